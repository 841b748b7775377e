"""The micro-batches that stages and ranks hold at once, from the lifetimes of what they keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import le
from typing import NamedTuple

from runner.schedule.liveness import Kind, Lifetime, lifetimes
from runner.schedule.remembered import remembered
from runner.schedule.simulation.opportunistic import hurried
from runner.schedule.values import Action, Op, Program, Schedule

__all__ = ["KEPT", "Held", "held_by_ranks", "held_microbatches", "hurried_lifetimes"]

KEPT = (Kind.SAVED, Kind.DEFERRED, Kind.OUTPUT)
"""The kinds of things that a stage keeps between a forward and its backward, in the order of :class:`Held`."""


class Held(NamedTuple):
    """The numbers of micro-batches of one stage that are held at one moment, by what is kept of them."""

    saved: int
    deferred: int  # I is done, but W is not
    dropped: int  # F is done, but R is not


@remembered
def held_microbatches(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """For each stage, the micro-batches held while its forwards and recomputations run, at the largest moments.

    The micro-batch that runs counts as saved. What a rank has lent to another rank does not count in the meantime, and
    what it keeps for another rank belongs to none of its stages.
    """
    moments: list[set[tuple[Held, ...]]] = [set() for _ in range(schedule.stages)]
    for moment in _moments(schedule):
        moments[moment.stage].add((moment.held[moment.stage],))
    return tuple(tuple(held for (held,) in _largest(found)) for found in moments)


@remembered
def held_by_ranks(schedule: Schedule) -> tuple[tuple[tuple[Held, ...], ...], ...]:
    """For each rank, its largest moments: what it holds of each of its stages, in their order, at one time."""
    moments: list[set[tuple[Held, ...]]] = [set() for _ in range(schedule.ranks)]
    stages = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    nothing = Held(0, 0, 0)
    for moment in _moments(schedule):
        moments[moment.rank].add(tuple(moment.held.get(stage, nothing) for stage in stages[moment.rank]))
    return tuple(tuple(_largest(found)) for found in moments)


class _Moment(NamedTuple):
    """A forward or recomputation of a stage that runs, and what its rank holds of every stage meanwhile."""

    rank: int
    stage: int
    held: dict[int, Held]


@remembered
def hurried_lifetimes(
    view: Schedule | Program,
) -> tuple[tuple[tuple[Action, ...], ...], tuple[tuple[Lifetime, ...], ...]]:
    """Each rank's list in the order that keeps most activations, and what is alive on the rank then."""
    rows = hurried(view)
    return rows, lifetimes(view, rows)


def _moments(schedule: Schedule) -> Iterator[_Moment]:
    for rank, (row, living) in enumerate(zip(*hurried_lifetimes(schedule), strict=True)):
        changes: dict[Action | None, list[tuple[int, int]]] = defaultdict(list)  # action -> (index in Held, change)
        for each in living:
            if each.kind in KEPT:
                changes[each.begins].append((KEPT.index(each.kind), 1))
                changes[each.ends].append((KEPT.index(each.kind), -1))
        counts: dict[int, list[int]] = defaultdict(lambda: [0] * len(KEPT))
        for action in row:
            now = counts[action.stage]
            if action.op is Op.F or action.op is Op.R:
                held = {stage: Held(*each) for stage, each in counts.items()}
                saved, deferred, dropped = now
                yield _Moment(rank, action.stage, held | {action.stage: Held(saved + 1, deferred, dropped)})
            for count, by in changes[action]:
                now[count] += by


def _largest(moments: Iterable[tuple[Held, ...]]) -> list[tuple[Held, ...]]:
    """The moments that are not exceeded by another moment that is at least as large in all numbers, in order."""
    largest: list[tuple[tuple[Held, ...], list[int]]] = []
    for moment in sorted(moments, reverse=True):  # one that exceeds another comes before it
        numbers = [count for held in moment for count in held]
        if not any(all(map(le, numbers, other)) for _, other in largest):
            largest.append((moment, numbers))
    return [moment for moment, _ in reversed(largest)]
