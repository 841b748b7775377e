"""Binomial checkpointing, the strategy with the fewest forwards for a given number of kept inputs.

Source: A. Griewank, A. Walther 2000, Algorithm 799: Revolve, ACM Transactions on Mathematical Software 26(1). It
assumes that all layers cost the same. With s kept inputs, including the first of the chain, and at most r runs of each
layer before its backward, at most beta(s, r) = (s + r choose s) layers can be reversed. With the least such r, l layers
take t(l, s) = r l - beta(s + 1, r - 1) forwards, and l more that keep a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as counted
from math import comb

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, StageChain
from runner.options import Option

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    return program_of(chain.first, chain.last, chain.options["slots"], _decide)


def _candidates(chain: StageChain) -> Iterator[Candidate]:
    """Every number of slots up to the logarithm of the layers, and powers of two."""
    count = len(chain.layers)
    for slots in sorted({*range(1, count.bit_length() + 1), *(2**power for power in range(count.bit_length()))}):
        yield Candidate(f"revolve slots={slots}", program_of(chain.first, chain.last, slots, _decide))


def _decide(first: int, last: int, slots: int) -> Cut[int] | Keep[int]:
    """Cut off the left part, which is run again with all slots; the right part has one less, which holds its input.

    Each right part is cut again, until it is one layer, which keeps its graph.
    """
    if first == last:
        return Keep(last, slots)
    return Cut(first + _split(last - first + 1, slots) - 1, inside=slots, rest=slots - 1)


def _split(num_layers: int, slots: int) -> int:
    """Number of layers of the left part: the smallest for which neither part needs more repetitions than the whole."""
    repetitions = next(r for r in counted(1) if _reversible(slots, r) >= num_layers)
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
    candidates=_candidates,
)
