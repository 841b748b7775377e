"""Varuna's static order: activations are recomputed just in time for their gradient, except on the last rank.

Source: Athlur et al., Varuna, 2022, and its schedule generator: a free rank prefers a backward to a recomputation to a
forward, played with B = 2 F and R = F. What the paper does at run time, a forward where a gradient is late, is left.
"""

from __future__ import annotations

from dataclasses import replace

from runner.errors import Problem
from runner.schedule.catalogue.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.list_scheduling import Clock, list_schedule
from runner.schedule.simulation.clock import Costs
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "just_in_time", "varuna"]

_PREFERENCE = {Op.B: 0, Op.R: 1, Op.F: 2}


def varuna(ranks: int, microbatches: int) -> Schedule:
    """Varuna's order for D ranks and T micro-batches."""
    rows = []
    for rank in range(ranks):
        row = [make(rank, m) for m in range(microbatches) for make in (forward, backward)]
        recomputed = range(microbatches if rank < ranks - 1 else 0)
        rows.append(row + [Action(Op.R, rank, m) for m in recomputed])
    draft = of_one_pipeline("varuna", looping(ranks, 1), rows, microbatches)
    return list_schedule(draft, Costs().per_stage(ranks, 1), just_in_time)


def just_in_time(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
    """Backwards first, then recomputations, then forwards, of these the latest stage's.

    A recomputation may begin as late as it can and still end with the backward whose gradient it awaits.
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
    """A rank that takes forwards before their turn holds at most a step's."""
    order = varuna(request.ranks, request.microbatches)
    return replace(order, ahead=request.memory_limit or request.microbatches) if request.opportunistic else order


def _varuna_problems(request: ScheduleRequest) -> list[Problem]:
    if request.memory_limit is None or request.opportunistic:
        return []
    why = "Without it the order is fixed, and with it what a rank keeps"
    fix = "schedule.memory_limit=null"
    rule = "needs schedule.opportunistic=true"
    return [Problem("schedule.memory_limit", request.memory_limit, rule, why, fix)]


SPEC = ScheduleSpec(
    name="varuna",
    position=150,
    description="every rank but the last recomputes its forward just before the backward: one activation at a time",
    summary="every forward twice; `schedule.opportunistic`: late gradients let forwards go first",
    source="Athlur et al., Varuna, 2022: its static order, and its run-time rule with schedule.opportunistic",
    formulas=None,
    generate=_varuna,
    keys=frozenset({"opportunistic", "memory_limit"}),
    constraint=_varuna_problems,
)
