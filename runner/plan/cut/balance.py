"""Improves a partition step by step: moves boundaries for as long as a measure of the whole partition falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from runner.plan.cut.values import Partition

__all__ = ["Balance", "balance_of", "balance_ranks", "descend", "moved"]

_MOST_STAGES_TOGETHER = 16

Key = tuple[float, ...]


class Balance(NamedTuple):
    """How even the costs of a partition are; smaller is better, and the first number counts most.

    Args:
        busiest_rank: the largest sum of a rank.
        squares: the sum of the squares of the ranks' sums.
        slowest_stage: the largest cost of a stage.
    """

    busiest_rank: float
    squares: float
    slowest_stage: float


def balance_of(costs: Sequence[float], placement: Sequence[int]) -> Callable[[Partition], Balance]:
    """A function that measures partitions.

    Args:
        costs: non-negative cost of each layer.
        placement: rank of each stage.
    """
    prefix = list(accumulate(costs, initial=0.0))
    ranks = max(placement) + 1

    def measured(candidate: Partition) -> Balance:
        sums = [0.0] * ranks
        stages = [prefix[last + 1] - prefix[first] for first, last in candidate]
        for rank, cost in zip(placement, stages, strict=True):
            sums[rank] += cost
        return Balance(max(sums), sum(each * each for each in sums), max(stages))

    return measured


def balance_ranks(costs: Sequence[float], layers: Partition, placement: Sequence[int]) -> Partition:
    """The most even partition that can be reached from ``layers``; arguments are those of :func:`balance_of`."""
    return descend(layers, balance_of(costs, placement))


def descend(layers: Partition, key: Callable[[Partition], Key]) -> Partition:
    """Find the best partition that can be reached from ``layers`` by moving one or several boundaries by one layer.

    This is a local search, because the cost of an exact one would grow exponentially with the number of stages.

    Args:
        layers: the partition to start from.
        key: measures a partition; smaller is better.
    """
    best = key(layers)
    while True:
        found = min(((key(each), each) for each in moved(layers)), default=(best, layers))
        if found[0] >= best:
            return layers
        best, layers = found


def moved(layers: Partition) -> Iterator[Partition]:
    """Every partition with boundaries i .. j one layer further up or down."""
    firsts = [first for first, _ in layers]
    end = layers[-1][1] + 1
    together = len(layers) if len(layers) <= _MOST_STAGES_TOGETHER else 1
    for i in range(1, len(layers)):
        for j in range(i, min(len(layers), i + together)):
            for step in (-1, 1):
                made = [*firsts[:i], *(first + step for first in firsts[i : j + 1]), *firsts[j + 1 :], end]
                if all(a < b for a, b in zip(made, made[1:], strict=False)):
                    yield tuple((a, b - 1) for a, b in zip(made, made[1:], strict=False))
