"""The shortest order that fits, found by a search over published orders and over orders of list scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.forms import ANY_CHUNKS
from runner.schedule.generators.search import search
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Schedule

__all__ = ["auto_spec"]


def auto_spec(searched: Sequence[ScheduleSpec]) -> ScheduleSpec:
    """The entry of ``auto``, which chooses among these and the orders of list scheduling."""
    return ScheduleSpec(
        name="auto",
        position=250,
        description="the shortest of all published orders and of those that list scheduling finds, that fits",
        summary="the shortest that fits, for seconds of planning",
        figures=("", ""),
        source="a search over this table and over list scheduling on one, two and V-placed chunks",
        formulas=None,
        generate=lambda request: _auto(request, searched),
        keys=frozenset({"memory_limit"}),
        examples={"memory_limit": (2, 4)},
        default_chunks=None,
        chunks=ANY_CHUNKS,
        one_rank=True,
        by_plan=True,
    )


def _auto(request: ScheduleRequest, searched: Sequence[ScheduleSpec]) -> Schedule:
    """Choose only by the costs of the request; a plan chooses by the stages' seconds and bytes instead."""
    costs, limit = request.costs, request.memory_limit

    def costs_of(placement: tuple[int, ...]) -> StageCosts:
        return costs.per_stage(len(placement), len(placement) // request.ranks) if isinstance(costs, Costs) else costs

    def rate(schedule: Schedule) -> tuple[float, bool]:
        played = simulate(schedule, costs_of(schedule.placement[0]))
        return played.makespan, limit is None or max(played.peak_activations) <= limit

    return search(request, searched, costs_of, rate).best.schedule
