"""Train large neural networks well: declare the policies, see the prediction, run them equally.

Importing this package imports nothing heavy; every room is imported where it is needed.
"""

import sys

if sys.flags.optimize:  # before anything is imported whose assertions do work
    from runner.asserted import keep_assertions

    keep_assertions()

__version__ = "0.1.0"

__all__ = ["__version__"]
