"""Binomial checkpointing, the strategy with the fewest forwards for a given number of kept inputs.

Source: A. Griewank, A. Walther 2000, Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26(1). It
assumes that all layers cost the same. With s kept inputs, including the first of the chain, and at most r runs of each
layer before its backward, at most beta(s, r) = (s + r choose s) layers can be reversed. With the least such r, l layers
take t(l, s) = r l - beta(s + 1, r - 1) forwards, and l more that keep a graph.
"""

from __future__ import annotations

from itertools import count
from math import comb

from runner.memory.solve.strategy import Option, Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    return _reverse(chain.first, len(chain.layers), chain.options["slots"])


def _reverse(first: int, num_layers: int, slots: int) -> ChainProgram:
    """Cut off the left part, which is run again with all slots; the right part has one less, which holds its input.

    Each right part is cut again, until it is one layer, which keeps its graph.
    """
    program = []
    while num_layers > 1:
        left = _split(num_layers, slots)
        inside = _reverse(first, left, slots) if left > 1 else ()
        program.append(Segment(first, first + left - 1, recompute=True, inside=inside))
        first, num_layers, slots = first + left, num_layers - left, slots - 1
    return (*program, Segment(first, first))


def _split(num_layers: int, slots: int) -> int:
    """Number of layers of the left part: the smallest for which neither part needs more repetitions than the whole."""
    repetitions = next(r for r in count(1) if _reversible(slots, r) >= num_layers)
    return max(1, _reversible(slots, repetitions - 2), num_layers - _reversible(slots - 1, repetitions))


def _reversible(slots: int, repetitions: int) -> int:
    """beta(s, r), the most layers that can be reversed."""
    return comb(slots + repetitions, slots) if repetitions >= 0 else 0


STRATEGY = Strategy(
    "revolve",
    _solve,
    source="Griewank and Walther 2000, Algorithm 799: Revolve",
    about="a fixed number of layer inputs is kept, and the rest is run forward again as often as it must be",
    options=(
        Option(
            "slots",
            int,
            "layer inputs that a stage keeps at once, that of its first included",
            example="4",
            rule="must be at least 1",
            breaks=lambda slots: slots < 1,
            fix="1",
        ),
    ),
)
