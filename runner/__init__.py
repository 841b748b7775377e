"""Train large neural networks well: declare the policies, see the prediction, run them equally.

Importing this package imports nothing heavy; every room is imported where it is needed.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
