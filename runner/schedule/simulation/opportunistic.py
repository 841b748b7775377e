"""Varuna's rule at run time: where the gradient of the next backward is late, the rank takes its next forward instead.

A forward is taken with its own RECV and SEND, and only once its input is there. So forwards keep their order among
themselves, backwards theirs, and with them each channel's messages, which carry either activations or gradients. What
a rank has not done is always its own list with some forwards missing; so is, over all ranks, the global order of the
lowering: its first action that is left has all it waits for, and the rank that it belongs to either is at it or ends
a forward that waits for nothing. No order of arrivals can deadlock.

Weights' gradients are added by the backwards, in their order: the result does not depend on what arrives when.

Source: Athlur et al., Varuna, 2022, opportunistic scheduling. The bound on the forwards is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.list_scheduling import Clock, list_schedule
from runner.schedule.liveness import change_in_flight
from runner.schedule.simulation.clock import Costs, Jitter, StageCosts
from runner.schedule.values import Action, Op, Payload, Program, Schedule

__all__ = ["awaits_gradient", "hurried", "realised", "take_forward"]


def awaits_gradient(schedule: Schedule, action: Action) -> bool:
    """Whether an action is a backward whose gradient another rank may send late."""
    return action.op in (Op.B, Op.I) and action.stage < schedule.stages - 1


def take_forward(actions: list[Action], at: int, ahead: int) -> Action | None:
    """Put the next forward, with its RECV and SEND, before the action at a place of a rank's list.

    Args:
        actions: the rank's list, which is changed.
        at: the place; what stands before it has been done.
        ahead: see :class:`runner.schedule.values.Schedule`.

    Returns:
        the forward. Where there is none, or the rank holds enough, the result is None and nothing is changed.
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
    """Each rank's list if all its gradients were late, which is the order that holds most.

    Where ranks may not leave their order, these are the lists as they are.
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

    The result is in order itself: simulated with the same costs and jitter it takes the same time.
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
