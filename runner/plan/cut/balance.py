"""Balances ranks with several stages: moves boundaries until the ranks' sums are even."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from runner.plan.cut.values import Partition, StageLimit

__all__ = ["balance_ranks"]

_MOST_STAGES_TOGETHER = 16


def balance_ranks(
    costs: Sequence[float], layers: Partition, placement: Sequence[int], limit: StageLimit | None = None
) -> Partition:
    """Find the best partition that can be reached from ``layers`` by moving one or several boundaries by one layer.

    Partitions are compared by the busiest rank, then by the sum of squares over ranks, then by the largest stage. This
    is a local search, because the cost of an exact one would grow exponentially with the number of stages.

    Args:
        costs: non-negative cost of each layer.
        layers: the partition to start from, which must keep to ``limit``.
        placement: rank of each stage.
        limit: which layers a stage may hold.
    """
    prefix = list(accumulate(costs, initial=0.0))
    ranks = max(placement) + 1

    def key(candidate: Partition) -> tuple[float, float, float]:
        sums = [0.0] * ranks
        stages = [prefix[last + 1] - prefix[first] for first, last in candidate]
        for rank, cost in zip(placement, stages, strict=True):
            sums[rank] += cost
        return max(sums), sum(each * each for each in sums), max(stages)

    best = key(layers)
    while True:
        found = min(((key(each), each) for each in _moved(layers, limit)), default=(best, layers))
        if found[0] >= best or found[1] == layers:
            return layers
        best, layers = found


def _moved(layers: Partition, limit: StageLimit | None) -> Iterator[Partition]:
    """Every partition with boundaries i .. j one layer further up or down."""
    firsts = [first for first, _ in layers]
    end = layers[-1][1] + 1
    together = len(layers) if len(layers) <= _MOST_STAGES_TOGETHER else 1
    for i in range(1, len(layers)):
        for j in range(i, min(len(layers), i + together)):
            for step in (-1, 1):
                moved = [*firsts[:i], *(first + step for first in firsts[i : j + 1]), *firsts[j + 1 :], end]
                if all(a < b for a, b in zip(moved, moved[1:], strict=False)):
                    made = tuple((a, b - 1) for a, b in zip(moved, moved[1:], strict=False))
                    if limit is None or all(limit.fits(*made[stage], stage) for stage in range(i - 1, j + 1)):
                        yield made
