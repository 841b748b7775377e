"""Zero bubble by list scheduling: the order follows from costs and from the number of activations that a rank may keep.

Source: the idea is the automatic scheduler of Qi et al., Zero Bubble Pipeline Parallelism, 2024. As there, a few rules
are tried and the best result is kept; hand-written orders that fit the limit are tried too.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.schedule.generators.forms import whole_number
from runner.schedule.generators.layout import of_one_pipeline
from runner.schedule.generators.list_orders import list_orders
from runner.schedule.generators.one_directional.zero_bubble import zb_h1, zb_h2
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Schedule

__all__ = ["SPEC", "zb_auto"]


def zb_auto(ranks: int, microbatches: int, costs: StageCosts, limit: int) -> Schedule:
    """Find the order with the shortest step that keeps at most ``limit`` activations on each rank.

    Among orders with equal steps, take the one whose ranks idle least between their first and last action, then the one
    with the fewest activations.

    Args:
        ranks, microbatches: D and T.
        costs: durations of F, I and W of each stage, and of messages.
        limit: number of micro-batches that a rank may keep between F and W, at least 1; D in ZB-1P, 2 D in ZB-2P.
    """

    def quality(schedule: Schedule) -> tuple[float, float, float]:
        times = simulate(schedule, costs)
        return times.makespan, max(times.inner_idle), max(times.peak_activations)

    best = min(_candidates(ranks, microbatches, costs, limit), key=quality)
    return of_one_pipeline("zb_auto", best.placement[0], best.actions, microbatches)


def _candidates(ranks: int, microbatches: int, costs: StageCosts, limit: int) -> Iterator[Schedule]:
    yield from list_orders("zb_auto", zb_h1(ranks, microbatches), costs, limit)
    if limit >= min(ranks, microbatches):
        yield zb_h1(ranks, microbatches)
    if min(microbatches, limit) >= 2 * ranks - 1:
        yield zb_h2(ranks, microbatches)


def _zb_auto(request: ScheduleRequest) -> Schedule:
    costs, ranks = request.costs, request.ranks
    per_stage = costs.per_stage(ranks, 1) if isinstance(costs, Costs) else costs
    return zb_auto(ranks, request.microbatches, per_stage, request.option("memory_limit") or ranks)


SPEC = ScheduleSpec(
    name="zb_auto",
    position=90,
    description="zero bubble by list scheduling from the stages' seconds, or cost.*, under schedule.memory_limit",
    summary="order found for measured seconds, under `schedule.memory_limit`",
    source="Qi et al., Zero Bubble Pipeline Parallelism, 2024, automatic scheduling",
    formulas=None,
    generate=_zb_auto,
    options=(
        whole_number(
            "memory_limit",
            1,
            "micro-batches, in units of a rank's whole share, that a rank may keep between F and W; null = the ranks",
            example=4,
            elsewhere="The order of the other schedules is fixed",
            legal=(2, 4, 8),
        ),
    ),
    by_costs=True,
)
