"""Defines what each action waits for. Only this module does; checker, simulator, lowering and executor use it."""

from __future__ import annotations

from runner.schedule.fills import Shown
from runner.schedule.values import Action, Op, Payload, Program, Schedule

__all__ = ["dependencies"]


def dependencies(view: Schedule | Program, action: Action) -> tuple[Action, ...]:
    """The actions that must have ended before ``action`` may start.

    In a schedule, a forward waits for the forward of the stage before. In a program, it waits for the message instead,
    if that stage is on another rank. A rank begins to reduce a stage when its own gradients are complete; the sum is
    complete when every rank with a copy of the stage has reduced it. What follows from the order of the rank's own list
    is not repeated here.

    Args:
        view: the schedule or program to which ``action`` belongs.
        action: one of its actions; its stage and micro-batch must exist in ``view``.
    """
    lowered = isinstance(view, Program)
    schedule = view.schedule if isinstance(view, Program) else view
    op, stage = action.op, action.stage
    if op is Op.REDUCE:
        rank, window = schedule.rows[action.row][stage], schedule.microbatches_of_window(action.window)
        return tuple(_weight_gradient(schedule, stage, m) for m in window if schedule.rank_of(stage, m, Op.B) == rank)
    if op is Op.STEP:
        return tuple(action._replace(op=Op.REDUCE, row=row) for row in schedule.copies_of(stage))
    if op is Op.FILL:
        return _before_fill(schedule, action)
    microbatch = action.microbatch
    assert microbatch is not None  # only REDUCE, STEP and fills may have none
    if op is Op.F:
        return () if stage == 0 else (_input(schedule, action, lowered),)
    if op is Op.B or op is Op.I:
        saved = Action(Op.R if schedule.is_recomputed(stage, microbatch) else Op.F, stage, microbatch)
        back = _returned(schedule, stage, microbatch, lowered)
        if stage == schedule.stages - 1:
            return (saved, *back)
        return (saved, *back, _output_gradient(schedule, stage, microbatch, lowered))
    if op is Op.W:
        return (Action(Op.I, stage, microbatch),)
    if op is Op.R:
        if not schedule.has_other_backward(stage):
            return (Action(Op.F, stage, microbatch),)
        return () if stage == 0 else (_input(schedule, action, lowered),)
    if op is Op.OUT:
        return (Action(Op.F, stage, microbatch),)
    if op is Op.IN:
        return (action._replace(op=Op.OUT),)
    if action.payload is Payload.STASH:
        return (_before_stash(schedule, action, microbatch),)
    if op is Op.SEND:
        return (_produced(schedule, stage, microbatch, action.payload),)
    source = stage + 1 if action.payload is Payload.GRADIENT else stage - 1
    here = schedule.rank_of(stage, microbatch, Op.F if action.payload is Payload.ACTIVATION else Op.B)
    return (Action(Op.SEND, source, microbatch, action.payload, here),)


def _before_fill(schedule: Schedule, fill: Action) -> tuple[Action, ...]:
    """The action that a fill waits for in its own micro-batch, and all fills of the kind that it follows."""
    assert schedule.filling is not None  # a schedule with fills has a filling, which defines their kinds
    kind = schedule.filling.kind(fill.fill)
    before = () if kind.follows is None else schedule.fills_of(kind.follows, fill.stage)
    if kind.shown_by is None:
        return before
    assert fill.microbatch is not None  # a fill that waits for an action of its micro-batch has one
    if kind.shown_by is Shown.FORWARD:
        return (Action(Op.F, fill.stage, fill.microbatch), *before)
    return (_weight_gradient(schedule, fill.stage, fill.microbatch), *before)


def _returned(schedule: Schedule, stage: int, microbatch: int, lowered: bool) -> tuple[Action, ...]:
    """The action that brings back the tensors for the backward, if another rank keeps them."""
    host = schedule.host_of(stage, microbatch)
    if host is None:
        return ()
    if lowered:
        return (Action(Op.RECV, stage, microbatch, Payload.STASH, host),)
    return (Action(Op.IN, stage, microbatch, peer=host),)


def _before_stash(schedule: Schedule, action: Action, microbatch: int) -> Action:
    """The action before a message with a stash.

    The order is: forward, sent by the owner, received by the host, sent back, received by the owner.
    """
    owner, host = schedule.rank_of(action.stage, microbatch), schedule.host_of(action.stage, microbatch)
    if action.op is Op.SEND and action.peer == host:
        return action._replace(op=Op.F, payload=None, peer=None)
    if action.op is Op.SEND:
        return action._replace(op=Op.RECV)  # the host's own receive, from the owner
    return action._replace(op=Op.SEND, peer=owner if action.peer == host else host)


def _input(schedule: Schedule, action: Action, lowered: bool) -> Action:
    """The action that brings the input of F, or of an R on another rank than its forward."""
    op, stage, microbatch = action.op, action.stage, action.microbatch
    assert microbatch is not None  # F and R always have one
    if lowered:
        source = schedule.rank_of(stage - 1, microbatch)
        if source != schedule.rank_of(stage, microbatch, op):
            payload = Payload.ACTIVATION if op is Op.F else Payload.INPUT
            return Action(Op.RECV, stage, microbatch, payload, source)
    return _joined_forward(schedule, stage - 1, microbatch)


def _output_gradient(schedule: Schedule, stage: int, microbatch: int, lowered: bool) -> Action:
    """The action that brings the gradient of the output of ``stage``."""
    if lowered:
        source = schedule.rank_of(stage + 1, microbatch, Op.B)
        if source != schedule.rank_of(stage, microbatch, Op.B):
            return Action(Op.RECV, stage, microbatch, Payload.GRADIENT, source)
    return _input_gradient(schedule, stage + 1, microbatch)


def _produced(schedule: Schedule, stage: int, microbatch: int, payload: Payload | None) -> Action:
    """The action that computes the content of a message that ``stage`` sends."""
    if payload is not Payload.GRADIENT:
        return _joined_forward(schedule, stage, microbatch)
    return _input_gradient(schedule, stage, microbatch)


def _joined_forward(schedule: Schedule, stage: int, microbatch: int) -> Action:
    """The last of the forwards that hand on their outputs together."""
    return Action(Op.F, stage, schedule.joined_with(microbatch)[-1])


def _input_gradient(schedule: Schedule, stage: int, microbatch: int) -> Action:
    return Action(Op.I if schedule.is_split(stage, microbatch) else Op.B, stage, microbatch)


def _weight_gradient(schedule: Schedule, stage: int, microbatch: int) -> Action:
    return Action(Op.W if schedule.is_split(stage, microbatch) else Op.B, stage, microbatch)
