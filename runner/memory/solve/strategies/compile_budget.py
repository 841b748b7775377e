"""The strategy that lets torch's compiler keep a share of what each layer would save.

The compiler cuts a layer's forward and backward graph so that the saved bytes are at most the share between the layer's
input, 0, and what is fastest, 1. It solves a knapsack of the operators that are dear to run again.

Source: torch's activation_memory_budget, of the partitioner of compiled graphs.
"""

from __future__ import annotations

from runner.memory.solve.strategies.none import STRATEGY as NONE
from runner.memory.solve.strategy import Strategy
from runner.options import Option

__all__ = ["STRATEGY"]

STRATEGY = Strategy(
    "compile_budget",
    NONE.solve,
    source="torch's activation_memory_budget",
    about="with compile=true, the compiler keeps a share of what each layer would save",
    options=(
        Option(
            "share",
            float,
            "the share that is kept, from 0 = inputs alone to 1 = whatever is fastest",
            example="0.5",
            rule="must be from 0 to 1",
            breaks=lambda share: not 0 <= share <= 1,
            fix="0.5",
        ),
    ),
    compiles=True,
)
