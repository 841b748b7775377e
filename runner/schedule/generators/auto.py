"""The shortest order that fits, found by a search over published orders and over orders of list scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from runner.options import Option
from runner.schedule.generators.forms import ANY_CHUNKS, whole_number
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
        options=(
            whole_number(
                "memory_limit",
                1,
                "micro-batches, in units of a rank's whole share, that a rank may keep; null = any number",
                example=4,
                elsewhere="The order of the other schedules is fixed",
                legal=(2, 4),
            ),
            Option(
                "asynchronous",
                str,
                "whether it considers asynchronous orders: refused, allowed; null = refused",
                "allowed",
                "must be refused or allowed",
                lambda value: value not in ("refused", "allowed"),
                fix="refused",
                elsewhere="A schedule that is named says by itself whether it is asynchronous",
            ),
        ),
        default_chunks=None,
        chunks=ANY_CHUNKS,
        one_rank=True,
        by_plan=True,
    )


def _auto(request: ScheduleRequest, searched: Sequence[ScheduleSpec]) -> Schedule:
    """Choose only by the costs of the request; a plan chooses by the stages' seconds and bytes instead."""
    costs, limit = request.costs, request.option("memory_limit")

    def costs_of(placement: tuple[int, ...]) -> StageCosts:
        return costs.per_stage(len(placement), len(placement) // request.ranks) if isinstance(costs, Costs) else costs

    def rate(schedule: Schedule) -> tuple[float, bool]:
        played = simulate(schedule, costs_of(schedule.placement[0]))
        return played.makespan, limit is None or max(played.peak_activations) <= limit

    return search(request, searched, costs_of, rate).best.schedule
