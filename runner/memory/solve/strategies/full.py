"""The strategy that computes every layer again."""

from __future__ import annotations

from runner.memory.solve.strategy import Candidate, Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    return tuple(Segment(layer, layer, recompute=True) for layer in chain.indices)


STRATEGY = Strategy(
    "full",
    _solve,
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, with segments of one layer",
    about="every layer keeps its input alone and is run forward again in its backward",
    candidates=lambda chain: [Candidate("full", _solve(chain))],
)
