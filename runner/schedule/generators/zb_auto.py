"""Zero bubble by list scheduling: the order follows from the costs and from what a rank may keep.

Source: the idea is the automatic scheduler of Qi et al., Zero Bubble Pipeline Parallelism, 2024. As there, a few rules
are tried and the best result is kept; the hand-written orders that fit the limit compete too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from runner.schedule.generators.layout import forward, input_gradient, looping, of_one_pipeline, weight_gradient
from runner.schedule.generators.list_scheduling import Clock, Urgency, list_schedule
from runner.schedule.generators.zero_bubble import zb_h1, zb_h2
from runner.schedule.simulate import StageCosts, simulate
from runner.schedule.values import Action, Op, Schedule

__all__ = ["zb_auto"]


def zb_auto(ranks: int, microbatches: int, costs: StageCosts, limit: int) -> Schedule:
    """The order with the shortest step of those that keep at most ``limit`` activations on each rank.

    Of equally long steps the one whose ranks idle least between their first and last action; then the one with the
    fewest activations.

    Args:
        ranks, microbatches: D and T.
        costs: durations of F, I and W per stage, and of messages.
        limit: micro-batches that a rank may keep between F and W, at least 1. D is ZB-1P's, 2 D ZB-2P's.
    """

    def quality(schedule: Schedule) -> tuple[float, float, float]:
        times = simulate(schedule, costs)
        return times.makespan, max(times.inner_idle), max(times.peak_activations)

    best = min(_candidates(ranks, microbatches, costs, limit), key=quality)
    return of_one_pipeline("zb_auto", best.placement[0], best.actions, microbatches)


def _candidates(ranks: int, microbatches: int, costs: StageCosts, limit: int) -> Iterator[Schedule]:
    makes = (forward, input_gradient, weight_gradient)
    rows = [[make(rank, m) for m in range(microbatches) for make in makes] for rank in range(ranks)]
    draft = of_one_pipeline("zb_auto", looping(ranks, 1), rows, microbatches)
    for forward_first, patient, taper in itertools.product((False, True), (False, True), (0, 1, 2)):
        yield list_schedule(draft, costs, _rule(limit, forward_first, patient, taper))
    if limit >= min(ranks, microbatches):
        yield zb_h1(ranks, microbatches)
    if min(microbatches, limit) >= 2 * ranks - 1:
        yield zb_h2(ranks, microbatches)


def _rule(limit: int, forward_first: bool, patient: bool, taper: int) -> Urgency:
    """One way to choose.

    Args:
        limit: micro-batches between F and W on a rank.
        forward_first: prefer F to I; else I to F. W comes last.
        patient: start no W that would still run when an F or I arrives.
        taper: how many fewer forwards each rank may run before its first I than the rank before it.
    """
    order = {Op.F: 0 if forward_first else 1, Op.I: 1 if forward_first else 0, Op.W: 2}

    def urgency(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
        full = clock.held[rank] >= limit
        if action.op is Op.F:
            warm_up = max(1, limit - taper * rank)
            if full or (not clock.backwards[rank] and clock.forwards[rank] >= warm_up):
                return None
        may_wait = action.op is Op.W and patient and not full
        if may_wait and clock.next_arrival(rank) < clock.now + clock.duration(action):
            return None
        return order[action.op], action.microbatch or 0

    return urgency
