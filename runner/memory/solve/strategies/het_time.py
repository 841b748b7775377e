"""Checkpointing with the least seconds for a given number of kept inputs, for layers that take different times.

It is revolve for layers of equal memory and unequal time: T(i, j, s), the least seconds to run forward again what lies
between layers i and j with s kept inputs, is the least over k of the seconds of i .. k - 1 and T(k, j, s - 1) and
T(i, k, s). With equal times it is revolve's number of forwards.

Source: A. Walther, A. Griewank 2008, Advantages of Binomial Checkpointing for Memory-Reduced Adjoint Calculations, and
the recursion for steps of different costs, solved for all i, j and s in O(L^3 s) sums.
"""

from __future__ import annotations

from runner.memory.solve.build import Cut, Keep, program_of
from runner.memory.solve.strategies.revolve import STRATEGY as REVOLVE
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, StageChain

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    from runner.memory.solve.solvers.timed import TimedSplits  # numpy, which a command without a plan does not need

    splits = TimedSplits([layer.forward_seconds for layer in chain.layers], chain.options["slots"])

    def decide(first: int, last: int, slots: int) -> Cut[int] | Keep[int]:
        if first == last:
            return Keep(last, slots)
        left = splits.left(first - chain.first, last - first + 1, slots)
        return Cut(first + left - 1, inside=slots, rest=slots - 1)

    return program_of(chain.first, chain.last, chain.options["slots"], decide)


STRATEGY = Strategy(
    "het_time",
    _solve,
    source="Walther and Griewank 2008, Advantages of Binomial Checkpointing for Memory-Reduced Adjoint Calculations",
    about="like revolve, for layers whose forwards take different times",
    options=REVOLVE.options,
)
