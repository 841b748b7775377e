"""Varuna's rule on one rank; :mod:`runner.schedule.simulation.opportunistic` explains why it cannot deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from runner.engine.actions.messages import Incoming, Messages
from runner.engine.context import RankContext, number_of
from runner.engine.transport.base import Handle
from runner.engine.transport.watched import WatchedTransport
from runner.schedule.simulation.opportunistic import awaits_gradient, next_forward, take_forward
from runner.schedule.values import Action, Op, Payload, Schedule

__all__ = ["Opportunist"]


class Opportunist:
    """Checks, before each backward, whether its gradient has arrived, and runs a forward first if not.

    Args:
        rank: what the parts of the executor share.
        messages: posts receives.
        schedule: the schedule of a training window.
        transport: tells which messages have arrived.
    """

    def __init__(self, rank: RankContext, messages: Messages, schedule: Schedule, transport: WatchedTransport) -> None:
        self._rank = rank
        self._messages = messages
        self._schedule = schedule
        self._transport = transport

    @classmethod
    def of(cls, rank: RankContext, messages: Messages) -> Self | None:
        """Make one for a rank; None if the schedule is run in its own order."""
        schedule, transport = rank.schedules[True], rank.transport
        return cls(rank, messages, schedule, transport) if isinstance(transport, WatchedTransport) else None

    def prefers_forward(self, actions: list[Action], at: int) -> bool:
        """Put the next forward before the action at position ``at``, if the rule says so; return whether it did.

        If neither the backward nor the forward can run, it waits until one of them can.
        """
        backward = actions[at]
        if not awaits_gradient(self._schedule, backward) or not self._size(backward):
            return False
        gradient: Incoming = self._rank.buffers.peek("gradient", backward.stage, number_of(backward))
        if gradient.has_arrived():
            return False
        forward = next_forward(actions, at, self._schedule.ahead)
        needed = None if forward is None else self._input_of(actions[at:], forward)
        if needed is None:
            return False
        if needed:
            self._wait(gradient.handles, needed)
        if gradient.has_arrived():
            return False
        take_forward(actions, at, self._schedule.ahead)
        return True

    def _input_of(self, actions: Sequence[Action], forward: Action) -> list[Handle] | None:
        """The messages with the forward's input, which are posted; None if they cannot be posted before their turn."""
        stage, microbatch = forward.stage, number_of(forward)
        if stage == 0 or not self._size(forward):
            return []
        if not self._rank.buffers.has("input", stage, microbatch):
            brings = Action(Op.RECV, stage, microbatch, Payload.ACTIVATION)
            receive = next(action for action in actions if action._replace(peer=None) == brings)
            if not self._messages.may_post(receive):
                return None
            self._messages.post(receive)
        value: Incoming = self._rank.buffers.peek("input", stage, microbatch)
        return value.handles

    def _size(self, action: Action) -> int:
        """The number of samples of an action's micro-batch."""
        return self._rank.window_of(action).size(number_of(action))

    def _wait(self, *messages: Sequence[Handle]) -> None:
        start = self._rank.timeline.moment()
        self._transport.wait_for_any(messages)
        self._rank.timeline.add("waiting", start)
