"""The strategy that cuts a stage of n layers into about the square root of n equal segments."""

from __future__ import annotations

from math import sqrt

from runner.memory.solve.build import equal_parts
from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["STRATEGY"]


def _solve(chain: StageChain) -> ChainProgram:
    """Keep the inputs of the segments, and of a single micro-batch the graph of the last one.

    The backward of the last segment follows its forward directly. So its graph is kept at no cost in memory, as
    ``torch.utils.checkpoint.checkpoint_sequential`` does, unless other micro-batches of the stage are in flight.
    """
    parts = equal_parts(chain.first, chain.last, max(1, round(sqrt(len(chain.layers)))))
    alone = chain.in_flight == 1
    return tuple(Segment(first, last, recompute=not (alone and last == chain.last)) for first, last in parts)


STRATEGY = Strategy(
    "chen_sqrt",
    _solve,
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost",
    about="as many equal segments as the square root of the layers; each keeps its input and is run forward again",
)
