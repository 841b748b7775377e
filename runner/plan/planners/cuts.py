"""Candidates: even cuts, cuts that are fast and fit, and the neighbours of one candidate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from math import comb

import numpy as np

from runner.plan.planners.orders import PlayedOrder
from runner.plan.planners.stages import Candidates, StageTable
from runner.schedule.simulation.batched import Numbers

__all__ = ["all_of", "neighbours", "num_of_all", "starts"]

_FAR = 8  # boundaries that are moved together
_HALVINGS = 24  # of the interval in which the least slowest stage lies
_PREFIXES = 8  # numbers of groups, those that hold most first, that keep less


Cut = tuple[int, ...]


def starts(table: StageTable, order: PlayedOrder, limit: float, ways: Sequence[int]) -> Candidates:
    """The candidates from which a search starts.

    For each way to keep, the groups that hold most keep less than everything: none of them, some, all. Each has an even
    cut, and the one whose slowest stage is the fastest among those that fit.

    Args:
        table: seconds and bytes of stages.
        order: the order of the pipeline.
        limit: bytes of a rank.
        ways: places of the ways to keep that are tried besides the first, in the division.
    """
    by_pressure = sorted(range(len(order.groups)), key=lambda each: (-order.pressure(order.groups[each]), each))
    found: dict[tuple[Cut, Cut], None] = {}
    for kept in _patterns(table, order, by_pressure, ways):
        shared = max(map(len, order.stages_of)) > 1  # then a stage may have more than its even share of the memory
        limits = (limit, np.inf) if shared else (limit,)
        for cut in (_even(table.num_layers, order.stages), *(_fast(table, order, kept, each) for each in limits)):
            if cut is not None:
                found[cut, kept] = None
    return _together(found)


def _patterns(table: StageTable, order: PlayedOrder, groups: Sequence[int], ways: Sequence[int]) -> Iterator[Cut]:
    allowed = table.setting.division.ways
    first = ways[0]
    yield (first,) * order.stages
    for way in ways[1:]:
        counts = {len(groups)}
        if allowed[way].by_stage and allowed[first].by_stage:
            counts |= {round(len(groups) * part / _PREFIXES) for part in range(1, _PREFIXES)} - {0}
        for count in sorted(counts):
            kept = [first] * order.stages
            for group in groups[:count]:
                for stage in order.groups[group]:
                    kept[stage] = way
            yield tuple(kept)


def _even(layers: int, stages: int) -> Cut:
    """As even as possible by the number of layers; later stages have the more, as the first keep most."""
    return tuple(layers * stage // stages for stage in range(stages + 1))


def _fast(table: StageTable, order: PlayedOrder, kept: Cut, limit: float) -> Cut | None:
    """The cut whose slowest stage is the fastest among those in which no stage exceeds its share of the memory."""
    seconds = {way: table.seconds(way).tolist() for way in set(kept)}
    sizes = [_bytes_of_stage(table, order, stage, way).tolist() for stage, way in enumerate(kept)]
    limits = [_share(table, order, stage, way, limit) for stage, way in enumerate(kept)]
    whole = max(each[-1] for each in seconds.values())
    high, low = whole, 0.0
    best = _greedy(table, kept, seconds, sizes, limits, high * 1.01)
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _greedy(table, kept, seconds, sizes, limits, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _bytes_of_stage(table: StageTable, order: PlayedOrder, stage: int, way: int) -> Numbers:
    """Bytes of the layers up to each, at the moment at which a rank holds most of this stage."""
    whole = left = 0
    for stages, moments in zip(order.stages_of, order.held, strict=True):
        if stage in stages:
            at = stages.index(stage)
            most = max(moments, key=lambda each: (each.whole[at], each.left_to_w[at]))
            if most.whole[at] >= whole:
                whole, left = most.whole[at], most.left_to_w[at]
    return table.bytes_with(way, whole, left)


def _share(table: StageTable, order: PlayedOrder, stage: int, way: int, limit: float) -> float:
    of_rank = max(len(stages) for stages in order.stages_of if stage in stages)
    return (limit - table.working(way)) / of_rank


def _greedy(
    table: StageTable,
    kept: Cut,
    seconds: dict[int, list[float]],
    sizes: Sequence[list[float]],
    limits: Sequence[float],
    slowest: float,
) -> Cut | None:
    """Each stage as long as ``slowest`` and its memory allow; None if layers are left or a stage would have none."""
    layers, first, cut = table.num_layers, 0, [0]
    for stage, way in enumerate(kept):
        time, size = seconds[way], sizes[stage]
        by_time = bisect_right(time, time[first] + slowest) - 1
        by_size = bisect_right(size, size[first] + limits[stage]) - 1
        end = min(by_time, by_size, layers - (len(kept) - stage - 1))
        if end <= first:
            return None
        cut.append(end)
        first = end
    return tuple(cut) if first == layers else None


def neighbours(candidate: Candidates, order: PlayedOrder, table: StageTable, ways: Sequence[int]) -> Candidates:
    """All candidates that differ from one in a step: neighbouring boundaries moved together, or what a group keeps.

    Args:
        candidate: a single one.
        order: the order of the pipeline.
        table: for the number of layers, and which ways to keep may differ between stages.
        ways: the ways to keep that are allowed.
    """
    cut, kept = tuple(candidate.cuts[:, 0].tolist()), tuple(candidate.kept[:, 0].tolist())
    moved = list(_moved(cut))
    others = list(_kept_otherwise(kept, order, table, ways))
    found = {(each, kept): None for each in moved}
    found |= {(cut, each): None for each in others}
    for each in others:
        changed = {stage for stage, (a, b) in enumerate(zip(kept, each, strict=True)) if a != b}
        for stage in changed:
            found |= {(one, each): None for one in _moved(cut, beside=stage)}
    return _together(found)


def _moved(cut: Cut, beside: int | None = None) -> Iterator[Cut]:
    inner = range(1, len(cut) - 1)
    for start in inner if beside is None else (each for each in (beside, beside + 1) if each in inner):
        for end in range(start, min(start + (_FAR if beside is None else 1), len(cut) - 1)):
            for by in (-1, 1):
                made = tuple(at + by if start <= place <= end else at for place, at in enumerate(cut))
                if all(a < b for a, b in zip(made, made[1:], strict=False)):
                    yield made


def _kept_otherwise(kept: Cut, order: PlayedOrder, table: StageTable, ways: Sequence[int]) -> Iterator[Cut]:
    allowed = table.setting.division.ways
    free = [way for way in ways if allowed[way].by_stage]
    if any(not allowed[way].by_stage for way in kept):
        return
    for number, group in enumerate(order.groups):
        for way in free:
            if kept[group[0]] != way:
                yield tuple(way if stage in group else each for stage, each in enumerate(kept))
                before = {stage for each in order.groups[: number + 1] for stage in each}
                yield tuple(way if stage in before else each for stage, each in enumerate(kept))


def num_of_all(layers: int, order: PlayedOrder, ways: int) -> int:
    """How many candidates there are in all."""
    return comb(layers - 1, order.stages - 1) * int(ways ** len(order.groups))


def all_of(order: PlayedOrder, table: StageTable, ways: Sequence[int]) -> Candidates:
    """All candidates of an order; ways to keep that cannot differ between stages are the same for all."""
    allowed = table.setting.division.ways
    cuts = [(0, *inner, table.num_layers) for inner in combinations(range(1, table.num_layers), order.stages - 1)]
    patterns: dict[Cut, None] = {}
    for chosen in product([way for way in ways if allowed[way].by_stage], repeat=len(order.groups)):
        kept = [0] * order.stages
        for group, way in zip(order.groups, chosen, strict=True):
            for stage in group:
                kept[stage] = way
        patterns[tuple(kept)] = None
    patterns |= {(way,) * order.stages: None for way in ways if not allowed[way].by_stage}
    return _together((cut, kept) for cut in cuts for kept in patterns)


def _together(found: Iterable[tuple[Cut, Cut]]) -> Candidates:
    cuts, kept = zip(*found, strict=True)
    return Candidates(np.array(cuts, dtype=np.int64).T, np.array(kept, dtype=np.int64).T)
