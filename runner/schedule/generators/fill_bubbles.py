"""Fills the bubbles of a schedule with other work, spread over as many optimizer steps as necessary.

The work is that of the first step's micro-batches. The number of steps is the interval after which all of it is done.

Source: Osawa, Li and Hoefler, "PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher
Information Matrices", 2023, and its rule of filling the idle times of a profiled step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from runner.schedule.fills import Filling, Shown
from runner.schedule.simulation.clock import Simulation, StageCosts, durations, simulate
from runner.schedule.stream import repeat
from runner.schedule.values import Action, Op, Schedule

__all__ = ["Gap", "Places", "fill", "fill_bubbles", "gaps_of", "work_of"]

_MARGIN = 0.05  # part of an item's time by which its gap must be longer
_SHOWING = {Shown.FORWARD: (Op.F,), Shown.GRADIENT: (Op.B, Op.W)}

Places = Mapping[int, Sequence[Action]]
"""The work of one step of one rank, by the index of its list before which it comes; the list's length is the end."""


class Gap(NamedTuple):
    """The idle time of a rank before one index of its list in a step, and its length."""

    before: int
    length: float


def fill_bubbles(base: Schedule, filling: Filling, costs: StageCosts, name: str) -> Schedule:
    """Make a stream of ``base`` with as many steps as the work needs, and with that work in it.

    Args:
        base: a schedule of one step and one pipeline.
        filling: the work.
        costs: durations of the compute of ``base`` and of the work.
        name: name of the result.
    """
    times, takes = simulate(base, costs), durations(costs, replace(base, filling=filling))
    placed = [
        fill(row, gaps_of(times, rank), work_of(row, filling), lambda item: takes[item.work][item.stage], filling)
        for rank, row in enumerate(base.actions)
    ]
    stream = repeat(base, max(map(len, placed)))
    size = len(base.actions[0])
    actions = tuple(tuple(_woven(row, size, of_rank)) for row, of_rank in zip(stream.actions, placed, strict=True))
    return replace(stream, name=name, actions=actions, filling=filling)


def gaps_of(times: Simulation, rank: int) -> list[Gap]:
    """The gaps of a rank, from the beginning of the step to the end of compute on all ranks."""
    gaps, free = [], 0.0
    for index, (start, end) in enumerate(zip(times.start[rank], times.end[rank], strict=True)):
        gaps.append(Gap(index, start - free))
        free = end
    gaps.append(Gap(len(times.end[rank]), times.makespan - free))
    return [gap for gap in gaps if gap.length > 0]


def fill(
    row: Sequence[Action],
    gaps: Sequence[Gap],
    work: Iterable[Action],
    seconds: Callable[[Action], float],
    filling: Filling,
) -> list[Places]:
    """Choose the places of the work, for one step after the other.

    As long as it can, each gap takes the first item whose prerequisites hold and that fits into it with a margin; gaps
    of the next steps take the rest. Items longer than all gaps come at the end of a step, and make the step longer.

    Args:
        row: a rank's compute of one step.
        gaps: the gaps of that step, in order.
        work: the items in order of priority.
        seconds: returns the duration of an item, in the unit of the gaps.
        filling: says what each kind of item waits for.
    """
    waiting = list(work)
    position = {action: index for index, action in enumerate(row)}
    placed: list[Places] = []

    def fits(item: Action, room: float) -> bool:
        return (1 + _MARGIN) * seconds(item) <= room

    def is_ready(item: Action, index: int) -> bool:
        """Whether the action that shows the item has ended, and all work of its stage before it has its place."""
        kind = filling.kind(item.fill)
        if kind.follows is not None and any(one.fill == kind.follows and one.stage == item.stage for one in waiting):
            return False
        return kind.shown_by is None or bool(placed) or _shown_at(item, kind.shown_by, position) < index

    while waiting:
        places: dict[int, list[Action]] = defaultdict(list)
        for index, room in gaps:
            while item := next((one for one in waiting if fits(one, room) and is_ready(one, index)), None):
                waiting.remove(item)
                places[index].append(item._replace(window=len(placed)))
                room -= (1 + _MARGIN) * seconds(item)
        for item in list(waiting):
            if not any(fits(item, gap.length) for gap in gaps) and is_ready(item, len(row)):
                waiting.remove(item)
                places[len(row)].append(item._replace(window=len(placed)))
        placed.append(places)
    return placed


def work_of(row: Sequence[Action], filling: Filling) -> list[Action]:
    """The work of a rank's step in order of priority; work on micro-batches in the order of their actions."""
    found: list[Action] = []
    stages = sorted({action.stage for action in row})
    for kind in filling.kinds:
        if kind.shown_by is None:
            found += [Action(Op.FILL, stage, fill=kind.name) for stage in stages]
        else:
            showing = [action for action in row if action.op in _SHOWING[kind.shown_by]]
            found += [action._replace(op=Op.FILL, fill=kind.name) for action in showing]
    return found


def _shown_at(item: Action, shown_by: Shown, position: Mapping[Action, int]) -> int:
    """The index of the action that shows an item its micro-batch."""
    showing = [item._replace(op=op, fill=None) for op in _SHOWING[shown_by]]
    return next(position[action] for action in showing if action in position)


def _woven(row: Sequence[Action], size: int, placed: Sequence[Places]) -> Iterator[Action]:
    """Insert the work into a rank's list, which has steps of ``size`` actions."""
    for window, begin in enumerate(range(0, len(row), size)):
        places = placed[window] if window < len(placed) else {}
        for index, action in enumerate(row[begin : begin + size]):
            yield from places.get(index, ())
            yield action
        yield from places.get(size, ())
