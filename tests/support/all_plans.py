"""Every plan of a small planning problem, played and walked here alone: what a joint search must nearly reach.

Of the package only the values and the orders of the schedules are used: none of the search's sums, plays or bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.plan.planners.values import Division, Line, Order, PlanningProblem
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.values import Schedule

__all__ = ["AllPlans", "Layout", "all_plans", "layouts", "least_seconds"]

Rows = NDArray[np.float64]


class Layout(NamedTuple):
    """What is fixed before layers are cut."""

    pipeline: int
    data: int
    tensor: int
    microbatches: int
    order: Order | None
    zero: int | None
    in_host: bool


@dataclass
class AllPlans:
    """Each candidate's seconds, and the bytes of its fullest rank."""

    seconds: Rows
    peaks: Rows


def layouts(of: PlanningProblem) -> Iterator[Layout]:
    """All degrees whose product divides the ranks, with every number of micro-batches of equal size.

    Of what may be fixed, the pipeline is known here.
    """
    for pipeline, data, each in product(range(1, of.ranks + 1), range(1, of.ranks + 1), of.divisions):
        if of.ranks % (pipeline * data * each.tensor) or pipeline > len(of.layers):
            continue
        if pipeline != (of.fixed or {}).get("pipeline", pipeline):
            continue
        counts = [n for n in range(1, of.batch + 1) if of.batch % (n * data) == 0]
        states = [(zero, False) for zero in of.zero if data > 1 or zero is None]
        states += [(zero, True) for zero in of.zero if zero and of.host_update is not None]
        orders = of.orders if pipeline > 1 else (None,)
        for count, order, (zero, in_host) in product(counts, orders, states):
            yield Layout(pipeline, data, each.tensor, count, order, zero, in_host)


@cache
def _schedule(order: Order, ranks: int, microbatches: int) -> Schedule | None:
    request, spec = ScheduleRequest(ranks, microbatches, order.chunks), SPECS[order.schedule]
    return fuse_backwards(spec.generate(request)) if spec.accepts(request) else None


def all_plans(of: PlanningProblem, layout: Layout) -> AllPlans | None:
    """All cuts of a layout with all that stages may keep; None if its order does not exist or has too many stages."""
    division = next(each for each in of.divisions if each.tensor == layout.tensor)
    schedule = None
    if layout.order is not None:
        schedule = _schedule(layout.order, layout.pipeline, layout.microbatches)
        if schedule is None:
            return None
    placement = schedule.placement if schedule is not None else ((0,),)
    stages, layers = len(placement[0]), len(of.layers)
    if stages > layers:
        return None
    own = [sorted({s for row in placement for s in range(stages) if row[s] == r}) for r in range(layout.pipeline)]
    cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    alike = _alike(own, stages)
    kept = [[way[alike[s]] for s in range(stages)] for way in product(range(len(division.ways)), repeat=max(alike) + 1)]
    cut = np.repeat(np.array(cuts).T, len(kept), axis=1)
    way = np.tile(np.array(kept).T, len(cuts))
    first, end, samples = cut[:-1], cut[1:], of.batch / (layout.data * layout.microbatches)

    def lines(name: str) -> Rows:
        found: Rows = _of_ranges([_each(getattr(ways, name), samples) for ways in division.ways])[way, first, end]
        return found

    entering = samples * np.array([0.0, *division.boundary])[first]
    costs = {name: lines(name) for name in ("saved", "left_to_w", "backward", "input_gradient", "weight_gradient")}
    costs["forward"] = _of_ranges([_each(division.forward, samples)])[0, first, end]
    link = of.links.inside
    speed = link.bytes_per_second or float("inf")
    message = link.latency_seconds + entering[1:] / speed
    if schedule is None:
        ends = layout.microbatches * (costs["forward"] + costs["backward"])
        most = costs["saved"]
    else:
        ends, most = _played(schedule, costs, message, entering)
    gradient = _of_ranges([division.gradient])[0, first, end]
    states = _of_ranges([_states(division, layout)])[0, first, end]
    working = np.array([max(_each(each.working, samples)) for each in division.ways])[way]
    peaks, seconds = np.zeros(cut.shape[1]), np.zeros(cut.shape[1])
    for rank, mine in enumerate(own):
        after = 0.0
        for stage in mine:
            ring = layout.data * len({row[stage] for row in placement})
            sums = 2 * (ring - 1) * (link.latency_seconds + gradient[stage] / ring / speed) if ring > 1 else 0.0
            after = after + sums + gradient[stage] * _update(of, layout)
        seconds = np.maximum(seconds, ends[rank] + after)
        peaks = np.maximum(peaks, states[mine].sum(axis=0) + most[rank] + working[mine].max(axis=0))
    return AllPlans(seconds, peaks)


def _alike(own: Sequence[Sequence[int]], stages: int) -> list[int]:
    """For each stage the number of its group: what the stages of one rank keep is chosen together."""
    found = list(range(stages))
    for _ in own:
        for mine in own:
            least = min(found[stage] for stage in mine)
            for stage in mine:
                found[stage] = least
    numbers = sorted(set(found))
    return [numbers.index(each) for each in found]


def _each(lines: Sequence[Line], samples: float) -> list[float]:
    return [constant + samples * each for constant, each in lines]


def _of_ranges(rows: Sequence[Sequence[float]]) -> Rows:
    ends = range(len(rows[0]) + 1)
    return np.array([[[sum(row[first:end]) for end in ends] for first in ends] for row in rows])


def _states(division: Division, layout: Layout) -> list[float]:
    shared = {least: layout.data if (layout.zero or 0) >= least else 1 for least in (1, 2, 3)}
    return [
        weight / shared[3] + gradient / shared[2] + (0.0 if layout.in_host else state / shared[1])
        for weight, gradient, state in zip(division.weight, division.gradient, division.state, strict=True)
    ]


def _update(of: PlanningProblem, layout: Layout) -> float:
    """Seconds for a byte of gradients."""
    each = of.step_seconds_per_byte
    if layout.in_host:
        copying, updating, ranks = of.host_update  # type: ignore[misc]
        each = copying + updating * min(layout.data, ranks)
    return each / (layout.data if layout.zero else 1)


def _played(schedule: Schedule, of: dict[str, Rows], message: Rows, entering: Rows) -> tuple[Rows, Rows]:
    """The end and the most bytes of each rank, from what each forward and backward waits for and leaves."""
    names: dict[Any, str] = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
    left = of["left_to_w"] + entering
    whole = of["saved"] + entering
    change = {"F": whole, "B": -whole, "I": left - whole, "W": -left}
    free, alive, most = (np.zeros((schedule.ranks, message.shape[1])) for _ in range(3))
    ends: dict[tuple[bool, int, int | None], tuple[int, Rows]] = {}
    lists = [list(reversed(row)) for row in schedule.actions]
    while any(lists):
        before = sum(map(len, lists))
        for rank, row in enumerate(lists):
            while row:
                op, stage, number = row[-1].op, row[-1].stage, row[-1].microbatch
                goes_on = op != "W" and 0 <= (beside := stage - 1 if op == "F" else stage + 1) < schedule.stages
                if goes_on:
                    if (op == "F", beside, number) not in ends:
                        break
                    sender, arrives = ends.pop((op == "F", beside, number))
                    late = message[min(stage, beside)] if sender != rank else 0.0
                    free[rank] = np.maximum(free[rank], arrives + late)
                row.pop()
                free[rank] += of[names[op]][stage]
                if op != "W":
                    ends[op == "F", stage, number] = rank, free[rank].copy()
                if op == "F":
                    alive[rank] += change["F"][stage]
                    most[rank] = np.maximum(most[rank], alive[rank])
                else:
                    alive[rank] += change[op][stage]
        assert sum(map(len, lists)) < before, "the order hangs"
    return free, most


def least_seconds(of: PlanningProblem, seen: Callable[[Layout, float], None] = lambda layout, least: None) -> float:
    """The least step of all plans that fit; ``seen`` is told the least of each layout, whether it fits or not."""
    best = float("inf")
    for layout in layouts(of):
        found = all_plans(of, layout)
        if found is not None:
            seen(layout, float(found.seconds.min()))
            best = min(best, float(found.seconds[found.peaks <= of.memory[1]].min(initial=np.inf)))
    return best
