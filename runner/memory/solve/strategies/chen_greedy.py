"""The strategy that cuts a stage into segments that save about the same number of bytes.

A walk through the layers adds up what they save, and begins a new segment when the sum exceeds a bound b. The bound is
searched for: it is the one with the least memory, which is that of the kept inputs and of the largest segment.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, Algorithm 3 and the search that it describes.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.memory.solve.strategy import Strategy
from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["STRATEGY"]

_BOUNDS = 64  # bounds that are tried, in a geometric row from the largest layer to all layers


def _solve(chain: StageChain) -> ChainProgram:
    saved = [layer.saved_bytes for layer in chain.layers]
    least, most = max(1, *saved), max(1, sum(saved))
    bounds = [least * (most / least) ** (step / (_BOUNDS - 1)) for step in range(_BOUNDS)]
    starts = min((_starts(saved, bound) for bound in bounds), key=lambda found: _bytes(chain, saved, found))
    ends = [*starts[1:], len(saved)]
    return tuple(
        Segment(chain.first + start, chain.first + end - 1, recompute=True)
        for start, end in zip(starts, ends, strict=True)
    )


def _starts(saved: Sequence[int], bound: float) -> list[int]:
    """The first layers of the segments whose sums do not exceed the bound, if one layer does not."""
    starts, total = [0], 0
    for at, size in enumerate(saved):
        total += size
        if total > bound and at > starts[-1]:
            starts.append(at)
            total = size
    return starts


def _bytes(chain: StageChain, saved: Sequence[int], starts: Sequence[int]) -> int:
    """The inputs of the segments of all micro-batches in flight, and one whole segment."""
    inputs = sum(chain.layers[start - 1].output_bytes for start in starts[1:])
    ends = [*starts[1:], len(saved)]
    return chain.in_flight * inputs + max(sum(saved[start:end]) for start, end in zip(starts, ends, strict=True))


STRATEGY = Strategy(
    "chen_greedy",
    _solve,
    source="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, Algorithm 3",
    about="segments that save about as many bytes each, as long as needs the least memory",
)
