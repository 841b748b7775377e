"""PipeFisher: K-FAC's work in the bubbles of a schedule, spread over as many optimizer steps as it takes.

The work is that of the first step's micro-batches. The number of steps is the interval after which the inverses are
new.

Source: Osawa, Li and Hoefler, "PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher
Information Matrices", 2023, and its rule of filling the idle times of a profiled step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from runner.errors import Problem
from runner.schedule.catalogue.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.generators.one_directional.gpipe import gpipe
from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b
from runner.schedule.simulation.clock import Costs, Simulation, StageCosts, durations, simulate
from runner.schedule.stream import repeat
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "Filling", "Gap", "fill", "gaps_of", "pipefisher"]

_MARGIN = 0.05  # of an item's time, which its place has besides
_SHOWN_BY = {Op.CURV_A: Op.F, Op.CURV_B: Op.B}
_SUMMED_BY = {Op.INV_A: Op.CURV_A, Op.INV_B: Op.CURV_B}

Filling = Mapping[int, Sequence[Action]]
"""Of one step of one rank: the work before each index of its list; the list's length stands for the end."""


class Gap(NamedTuple):
    """Idle time of a rank in one step: before which index of its list, and how long."""

    before: int
    length: float


def pipefisher(base: Schedule, costs: StageCosts) -> Schedule:
    """``base`` as a stream of as many steps as K-FAC's work needs, with that work in it.

    Args:
        base: one step of one pipeline with whole backwards.
        costs: durations of its compute and of the work.
    """
    times, takes = simulate(base, costs), durations(costs, base)
    fillings = [
        fill(row, gaps_of(times, rank), _work_of(row), lambda item: takes[item.op][item.stage])
        for rank, row in enumerate(base.actions)
    ]
    stream = repeat(base, max(map(len, fillings)))
    size = len(base.actions[0])
    actions = tuple(tuple(_woven(row, size, of_rank)) for row, of_rank in zip(stream.actions, fillings, strict=True))
    return replace(stream, name="pipefisher", actions=actions)


def gaps_of(times: Simulation, rank: int) -> list[Gap]:
    """When a rank idles, from the step's beginning to the end of its last rank's compute."""
    gaps, free = [], 0.0
    for index, (start, end) in enumerate(zip(times.start[rank], times.end[rank], strict=True)):
        gaps.append(Gap(index, start - free))
        free = end
    gaps.append(Gap(len(times.end[rank]), times.makespan - free))
    return [gap for gap in gaps if gap.length > 0]


def fill(
    row: Sequence[Action], gaps: Sequence[Gap], work: Iterable[Action], seconds: Callable[[Action], float]
) -> list[Filling]:
    """Where the work goes, step by step.

    Of the items whose prerequisites hold, each gap takes the first that it has room for, with a margin, as long as
    there is one; gaps of the next steps take what is left. What is longer than all gaps comes at the end of a step,
    where it makes the step longer.

    Args:
        row: a rank's compute of one step.
        gaps: of that step, in order.
        work: by priority.
        seconds: of an item, in the unit of the gaps.
    """
    waiting = list(work)
    position = {action: index for index, action in enumerate(row)}
    fillings: list[Filling] = []

    def fits(item: Action, room: float) -> bool:
        return (1 + _MARGIN) * seconds(item) <= room

    def is_ready(item: Action, index: int) -> bool:
        """Sums wait for what shows them, inversions for all sums of their stage."""
        if item.op in _SUMMED_BY:
            return not any(one.op is _SUMMED_BY[item.op] and one.stage == item.stage for one in waiting)
        return bool(fillings) or position[item._replace(op=_SHOWN_BY[item.op])] < index

    while waiting:
        filling: dict[int, list[Action]] = defaultdict(list)
        for index, room in gaps:
            while item := next((one for one in waiting if fits(one, room) and is_ready(one, index)), None):
                waiting.remove(item)
                filling[index].append(item._replace(window=len(fillings)))
                room -= (1 + _MARGIN) * seconds(item)
        for item in list(waiting):
            if not any(fits(item, gap.length) for gap in gaps) and is_ready(item, len(row)):
                waiting.remove(item)
                filling[len(row)].append(item._replace(window=len(fillings)))
        fillings.append(filling)
    return fillings


def _work_of(row: Sequence[Action]) -> list[Action]:
    """K-FAC's work of a rank's step, by priority; sums in the order of what shows them."""
    sums = [action._replace(op=op) for op, shown_by in _SHOWN_BY.items() for action in row if action.op is shown_by]
    stages = sorted({action.stage for action in row})
    return sums + [Action(op, stage) for op in _SUMMED_BY for stage in stages]


def _woven(row: Sequence[Action], size: int, fillings: Sequence[Filling]) -> Iterator[Action]:
    """A rank's list over steps of ``size`` actions, with the work in its places."""
    for window, begin in enumerate(range(0, len(row), size)):
        filling = fillings[window] if window < len(fillings) else {}
        for index, action in enumerate(row[begin : begin + size]):
            yield from filling.get(index, ())
            yield action
        yield from filling.get(size, ())


_FILLED = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _pipefisher(request: ScheduleRequest) -> Schedule:
    base, costs = _FILLED[request.base or "1f1b"](request.ranks, request.microbatches), request.costs
    return pipefisher(base, costs.per_stage(request.ranks, 1) if isinstance(costs, Costs) else costs)


def _pipefisher_problems(request: ScheduleRequest) -> list[Problem]:
    base = request.base
    if base is None or base in _FILLED:
        return []
    why = "Its work needs whole backwards, and every micro-batch of a stage on one rank"
    if base == "chimera":
        why = "Its pipelines hold each stage twice, and each copy sees a part of the micro-batches"
    return [Problem("schedule.base", base, f"must be one of {', '.join(_FILLED)}", why, "schedule.base=1f1b")]


SPEC = ScheduleSpec(
    name="pipefisher",
    position=180,
    description="1f1b or gpipe (schedule.base) with K-FAC's sums and inversions in the bubbles of several steps",
    summary="`1f1b` or `gpipe` (`schedule.base`) with the sums and inversions of `optimizer=kfac` in the bubbles",
    figures=("0.158, filled", "4 and more"),
    source="Osawa, Li and Hoefler, PipeFisher, 2023",
    formulas=None,
    generate=_pipefisher,
    keys=frozenset({"base"}),
    constraint=_pipefisher_problems,
    by_costs=True,
    searched=False,
)
