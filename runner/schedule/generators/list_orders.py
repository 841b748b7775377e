"""Orders from list scheduling, for any placement of stages: one for each rule to choose among ready actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from runner.schedule.generators.layout import backward, forward, input_gradient, weight_gradient
from runner.schedule.generators.list_scheduling import Clock, Urgency, list_schedule
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Action, Op, Schedule

__all__ = ["list_orders"]


def list_orders(
    name: str, placed: Schedule, costs: StageCosts, limit: int, *, split: bool = True
) -> Iterator[Schedule]:
    """Yield one order for each rule that finishes under the limit.

    Args:
        name: name of the schedules.
        placed: gives the placement of stages and the pipeline of each micro-batch; its order is not used.
        costs: durations of each stage, and of messages.
        limit: number of micro-batches that a rank may keep between F and B or W, for all its chunks, at least 1.
        split: whether backwards are I and W, or B.
    """
    makes = (forward, input_gradient, weight_gradient) if split else (forward, backward)
    rows: list[list[Action]] = [[] for _ in range(placed.ranks)]
    for microbatch, pipeline in enumerate(placed.pipeline_of_microbatch):
        for stage, rank in enumerate(placed.placement[pipeline]):
            rows[rank] += [make(stage, microbatch) for make in makes]
    draft = replace(placed, name=name, actions=tuple(map(tuple, rows)))
    patience = (False, True) if split else (False,)
    for urge, patient, taper in itertools.product((0.25, 0.5, 1.0), patience, (0, 1, 2)):
        try:
            yield list_schedule(draft, costs, _rule(draft, costs, limit, urge, patient, taper))
        except ValueError:  # this rule fills a rank with micro-batches for which later stages have no room
            continue


def _rule(draft: Schedule, costs: StageCosts, limit: int, urge: float, patient: bool, taper: int) -> Urgency:
    """Make a rule: the action with the most work after it comes first, and W comes last.

    Args:
        draft: the schedule with the actions.
        costs: durations of each stage, and of messages.
        limit: number of micro-batches that a rank may keep between F and B or W, for all its chunks.
        urge: how much later micro-batches are held back, in units of the busiest rank's work for one micro-batch.
        patient: whether to start no W that would still run when an F, B or I becomes ready.
        taper: the number of forwards by which the warm-up of each rank is shorter than that of the rank before.
    """
    chunks, ranks, room = draft.chunks, draft.ranks, limit * draft.chunks
    to_come = _to_come(draft, costs)
    step = urge * _busiest(draft, costs)

    def urgency(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
        op, stage, microbatch = action.op, action.stage, action.microbatch or 0
        held, chunk = clock.held[rank], stage // ranks
        if op is Op.W:
            may_wait = patient and held < room
            return (
                None if may_wait and clock.next_arrival(rank) < clock.now + clock.duration(action) else (1, microbatch)
            )
        if op is Op.F:
            reserved = chunks - 1 - chunk  # for the later chunks of this micro-batch, or of one before it
            warm_up = max(1, room - taper * rank * chunks)
            is_warm = clock.backwards[rank] > 0 or chunk > 0 or clock.forwards[rank] < warm_up
            if held + reserved >= room or not is_warm:
                return None
        return 0, microbatch * step - to_come[op][stage], stage

    return urgency


def _to_come(draft: Schedule, costs: StageCosts) -> dict[Op, list[float]]:
    """For each stage, the time of a micro-batch from its forward, or its backward, there to its end."""
    messages = [*costs.comm] or [0.0] * (draft.stages - 1)
    backwards = costs.I or costs.B
    back = [sum(backwards[: stage + 1]) + sum(messages[:stage]) for stage in range(draft.stages)]
    there = [sum(costs.F[stage:]) + sum(messages[stage:]) + back[-1] for stage in range(draft.stages)]
    return {Op.F: there, Op.B: back, Op.I: back}


def _busiest(draft: Schedule, costs: StageCosts) -> float:
    """The largest average work of a rank for one micro-batch."""
    share = 1 / len(draft.placement)
    work = [0.0] * draft.ranks
    for row in draft.placement:
        for stage, rank in enumerate(row):
            work[rank] += share * (costs.F[stage] + costs.B[stage])
    return max(work)
