"""Varuna's rule at run time: if the gradient of the next backward is late, the rank takes its next forward instead.

A forward is taken together with its own RECV and SEND, and only when its input is there. So forwards keep their order
among themselves, and so do backwards. The messages of a channel keep their order too, because a channel carries either
activations or gradients.

No order of arrivals can deadlock. The actions that a rank still has to do are always a part of its own list from which
some forwards have been removed, and the same holds for all ranks together and the global order of the lowering. Look at
the first remaining action of that order: everything that it waits for has been done. Its rank is either at this action
already, or is running a forward that does not wait for anything.

The backwards add the gradients of weights, in their order, so that the result does not depend on the arrivals.

Source: Athlur et al., Varuna, 2022, opportunistic scheduling. The limit on the number of forwards is the runner's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.liveness import change_in_flight
from runner.schedule.simulation.clock import Costs, Jitter, StageCosts
from runner.schedule.simulation.list_scheduling import Clock, list_schedule
from runner.schedule.values import Action, Op, Payload, Program, Schedule

__all__ = ["awaits_gradient", "hurried", "realised", "take_forward"]


def awaits_gradient(schedule: Schedule, action: Action) -> bool:
    """Whether an action is a backward whose gradient another rank may send late."""
    return action.op in (Op.B, Op.I) and action.stage < schedule.stages - 1


def take_forward(actions: list[Action], at: int, ahead: int) -> Action | None:
    """Move the next forward, with its RECV and SEND, before the action at an index of a rank's list.

    Args:
        actions: the rank's list, which is changed in place.
        at: the index; all actions before it have been done.
        ahead: see :class:`runner.schedule.values.Schedule`.

    Returns:
        The forward. If there is none, or if the rank holds ``ahead`` micro-batches already, the result is None and the
        list is not changed.
    """
    forward = next_forward(actions, at, ahead)
    if forward is None:
        return None
    own = [action for action in actions[at:] if _belongs(action, forward)]
    actions[at:] = [*own, *(action for action in actions[at:] if not _belongs(action, forward))]
    return forward


def next_forward(actions: Sequence[Action], at: int, ahead: int) -> Action | None:
    """The forward that :func:`take_forward` would take, or None."""
    if sum(map(change_in_flight, actions[:at])) >= ahead:
        return None
    return next((action for action in actions[at:] if action.op is Op.F), None)


def _belongs(action: Action, forward: Action) -> bool:
    """Whether an action is a forward, or brings its input, or sends its output."""
    same = (action.stage, action.microbatch) == (forward.stage, forward.microbatch)
    return same and (action.op is Op.F or action.payload is Payload.ACTIVATION)


def hurried(view: Schedule | Program) -> tuple[tuple[Action, ...], ...]:
    """Each rank's list in the order that it would run if all gradients were late; this order keeps most activations.

    If ranks may not leave their order, the lists are returned unchanged.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    if not schedule.ahead:
        return view.actions
    rows = []
    for row in map(list, view.actions):
        at = 0
        while at < len(row):
            if awaits_gradient(schedule, row[at]):
                take_forward(row, at, schedule.ahead)
            at += 1
        rows.append(tuple(row))
    return tuple(rows)


def realised(schedule: Schedule, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Schedule:
    """``schedule`` in the order in which its ranks run it if everything takes the time that the costs say.

    A simulation of the result in its own order, with the same costs and jitter, takes the same time.
    """
    if not schedule.ahead:
        return schedule
    if isinstance(costs, Costs):
        costs = costs.per_stage(schedule.stages, schedule.chunks, schedule.parts, schedule.filling)
    rows = schedule.actions
    forwards = [[action for action in row if action.op is Op.F] for row in rows]
    turn = [0] * schedule.ranks

    def urgency(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
        while rows[rank][turn[rank]] in clock.started:
            turn[rank] += 1
        due = rows[rank][turn[rank]]
        if action == due:
            return (0,)
        is_next = action.op is Op.F and action == forwards[rank][clock.forwards[rank]]
        may_be_taken = awaits_gradient(schedule, due) and clock.held[rank] < schedule.ahead
        return (1,) if is_next and may_be_taken else None

    return list_schedule(schedule, costs, urgency, jitter)
