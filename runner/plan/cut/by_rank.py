"""Cuts a chain of layers for ranks with several stages, whose memory is that of all their stages together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.plan.cut.balance import balance_of, descend
from runner.plan.cut.values import Partition, RankLimit

__all__ = ["fastest_that_fits", "least_peak_of_ranks"]


def fastest_that_fits(
    costs: Sequence[float], placement: Sequence[int], starts: Iterable[Partition], ranks: RankLimit
) -> Partition | None:
    """The most even partition found whose ranks keep to their limit; None if none is found.

    Args:
        costs: seconds of each layer.
        placement: rank of each stage.
        starts: partitions from which the search starts.
        ranks: the memory of ranks.
    """
    balance = balance_of(costs, placement)

    def key(layers: Partition) -> tuple[float, ...]:
        return ranks.excess(layers), *balance(layers)

    best = min((descend(start, key) for start in starts), key=key)
    return None if ranks.excess(best) else best


def least_peak_of_ranks(
    costs: Sequence[float],
    placement: Sequence[int],
    starts: Iterable[Partition],
    ranks: RankLimit,
    as_fast_as: Partition | None,
) -> Partition:
    """The partition found whose highest peak of a rank is least and, among these, the most even one.

    Args:
        costs, placement, starts, ranks: see :func:`fastest_that_fits`.
        as_fast_as: no rank and no stage of the result takes longer than the slowest of this partition, which must be
            among ``starts``; None means that they may.
    """
    balance = balance_of(costs, placement)
    allowed = balance(as_fast_as) if as_fast_as is not None else None

    def key(layers: Partition) -> tuple[float, ...]:
        busiest, squares, slowest = balance(layers)
        late = 0.0
        if allowed is not None:
            late = max(0.0, busiest - allowed.busiest_rank) + max(0.0, slowest - allowed.slowest_stage)
        return late, ranks.highest(layers), busiest, squares, slowest

    return min((descend(start, key) for start in starts), key=key)
