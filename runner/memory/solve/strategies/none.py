"""The strategy that keeps everything."""

from __future__ import annotations

from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    return (Segment(chain.first, chain.last),)


STRATEGY = Strategy(
    "none",
    _solve,
    about="every activation is kept for its backward",
    candidates=lambda chain: [Candidate("none", _solve(chain))],
)
