"""Varuna: activations are recomputed just in time for their gradient, except on the last rank.

Source: Athlur et al., Varuna, 2022, and its schedule generator: a free rank prefers a backward to a recomputation, and
a recomputation to a forward, simulated with B = 2 F and R = F. This is the static order; what the paper does at run
time, a forward when a gradient is late, is not done here.
"""

from __future__ import annotations

from dataclasses import replace

from runner.errors import Problem
from runner.options import Option
from runner.schedule.generators.forms import whole_number
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import Costs
from runner.schedule.simulation.list_scheduling import Clock, list_schedule
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "just_in_time", "varuna"]

_PREFERENCE = {Op.B: 0, Op.R: 1, Op.F: 2}


def varuna(ranks: int, microbatches: int) -> Schedule:
    """Generate Varuna's order for D ranks and T micro-batches."""
    rows = []
    for rank in range(ranks):
        row = [make(rank, m) for m in range(microbatches) for make in (forward, backward)]
        recomputed = range(microbatches if rank < ranks - 1 else 0)
        rows.append(row + [Action(Op.R, rank, m) for m in recomputed])
    draft = of_one_pipeline("varuna", looping(ranks, 1), rows, microbatches)
    return list_schedule(draft, Costs().per_stage(ranks, 1), just_in_time)


def just_in_time(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
    """Backwards go first, then recomputations, then forwards; in each, the latest stage goes first.

    A recomputation begins as late as possible, so that it ends with the backward for whose gradient it waits.
    """
    microbatch = action.microbatch or 0
    if action.op is Op.R:
        awaited = backward(action.stage + 1, microbatch)
        if awaited not in clock.started:
            return None
        due = clock.started[awaited] + clock.duration(awaited) - clock.duration(action)
        if clock.now < due:
            clock.wake_at(due)
            return None
    return _PREFERENCE[action.op], -action.stage, microbatch


def _varuna(request: ScheduleRequest) -> Schedule:
    """Generate the order; a rank that may run forwards early holds at most those of a step, or ``memory_limit``."""
    order = varuna(request.ranks, request.microbatches)
    if not request.option("opportunistic"):
        return order
    return replace(order, ahead=request.option("memory_limit") or request.microbatches)


def _varuna_problems(request: ScheduleRequest) -> list[Problem]:
    limit = request.option("memory_limit")
    if limit is None or request.option("opportunistic"):
        return []
    why = "Without it the order is fixed, and with it what a rank keeps"
    fix = "schedule.memory_limit=null"
    rule = "needs schedule.opportunistic=true"
    return [Problem("schedule.memory_limit", limit, rule, why, fix)]


SPEC = ScheduleSpec(
    name="varuna",
    position=150,
    description="every rank but the last recomputes its forward just before the backward: one activation at a time",
    summary="every forward twice; `schedule.opportunistic`: late gradients let forwards go first",
    source="Athlur et al., Varuna, 2022: its static order, and its run-time rule with schedule.opportunistic",
    formulas=None,
    generate=_varuna,
    options=(
        Option(
            "opportunistic",
            bool,
            "a forward may replace a backward whose gradient is late; null = false",
            "true",
            elsewhere="The other schedules are run in their order",
            legal=(False, True),
        ),
        whole_number(
            "memory_limit",
            1,
            "with opportunistic, micro-batches that a rank may keep between F and B; null = any number",
            example=4,
            elsewhere="The order of the other schedules is fixed",
        ),
    ),
    constraint=_varuna_problems,
)
