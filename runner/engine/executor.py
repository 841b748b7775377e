"""Run one rank's list of actions: a table from op to handler, and the buffers that they own.

The executor knows no schedule by name. Messages that an action needs were posted by RECV actions that the lowering
placed; the handler of the action waits for them. A buffer is put once and taken once; what is left at the end of a
window is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from runner.engine.actions.compute import Compute
from runner.engine.actions.curvature import ScheduledCurvature
from runner.engine.actions.messages import Messages
from runner.engine.actions.opportunist import Opportunist
from runner.engine.context import RankContext, RankView
from runner.engine.measure.timeline import Timeline
from runner.engine.transport.base import Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.sharding import Sharding
from runner.engine.window import Window
from runner.model.data import LossFunction
from runner.model.layers import StageModule
from runner.schedule.values import COMPUTE, CURVATURE, Action, Op, Payload, Schedule

__all__ = ["Executor"]


class Executor:
    """Runs compute, messages and reductions; the optimizer's part of STEP is handed to ``on_step``.

    Args:
        view: where this rank stands.
        stages: this rank's stage modules by stage.
        gradients: the gradients of each.
        loss: the loss function, used by the last stage.
        transport: how messages travel.
        schedules: see :class:`runner.engine.context.RankContext`.
        dtype: of the model's input.
        autocast: format of the forwards' matrix products; None where it is the weights' own.
        seed: what random layers are seeded from, with step, micro-batch and layer.
        on_losses: called once per window with targets on the last stage's rank, when the last loss is known.
        sharding: keeps the gradients of the rank's stage, where the engine does not.
        on_step: called once per window, when every stage of this rank came to its STEP.
    """

    def __init__(
        self,
        *,
        view: RankView,
        stages: Mapping[int, StageModule],
        gradients: Mapping[int, StageGradients],
        loss: LossFunction,
        transport: Transport,
        schedules: Mapping[bool, Schedule],
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        seed: int,
        on_losses: Callable[[Window], None],
        sharding: Sharding | None = None,
        on_step: Callable[[Window], None],
    ) -> None:
        self.view = view
        self.stages = stages
        self.gradients = gradients
        self.reductions: list[Handle] = []
        self.current: Action | None = None  # being executed
        self.training = True  # whether in a training window
        self.begun = 0  # actions so far
        self._transport = transport
        self._on_step = on_step
        self._stepped: set[int] = set()
        self._rank = RankContext(view, stages, transport, schedules, sharding)
        self._compute = Compute(self._rank, loss=loss, dtype=dtype, autocast=autocast, seed=seed, on_losses=on_losses)
        self._messages = Messages(self._rank)
        self._opportunist = Opportunist.of(self._rank, self._messages)
        self._handlers: dict[Op, Callable[[Window, Action], None]] = {
            Op.F: self._compute.forward,
            Op.R: self._compute.recompute,
            Op.B: self._compute.backward,
            Op.I: self._compute.backward_input,
            Op.W: self._compute.backward_weight,
            **dict.fromkeys(CURVATURE, self._compute.curvature),
            Op.SEND: self._messages.send,
            Op.RECV: self._messages.receive,
            Op.REDUCE: self._reduce,
            Op.STEP: self._step,
        }

    @property
    def timeline(self) -> Timeline:
        """What was done when; it may be replaced between windows."""
        return self._rank.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline) -> None:
        self._rank.timeline = timeline

    @property
    def curvature(self) -> ScheduledCurvature | None:
        """Does K-FAC's actions; set with the optimizer."""
        return self._rank.curvature

    @curvature.setter
    def curvature(self, curvature: ScheduledCurvature | None) -> None:
        self._rank.curvature = curvature

    @property
    def bytes_sent(self) -> dict[Payload, int]:
        """Bytes sent in training windows so far."""
        return self._messages.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, counts: dict[Payload, int]) -> None:
        self._messages.bytes_sent = counts

    def run(self, window: Window, actions: Sequence[Action], failed: Callable[[Action, Exception], Exception]) -> None:
        """Execute ``actions``, a part of a window's, in order, which the schedule's rule may change meanwhile.

        Args:
            failed: makes the error to raise when an action fails.
        """
        actions = list(actions)
        self.training = window.training
        self._compute.recomputed = {(a.stage, a.microbatch) for a in actions if a.op is Op.R}
        stashes = (a for a in actions if a.payload is Payload.STASH and a.stage in self.stages)
        self._compute.moved = {(a.stage, a.microbatch) for a in stashes}
        with torch.set_grad_enabled(window.training):
            for index in range(len(actions)):
                self.current = action = actions[index]
                self.begun += 1
                try:
                    if self._opportunist is not None and self._opportunist.prefers_forward(window, actions, index):
                        self.current = action = actions[index]
                    if action.op in COMPUTE:
                        self._messages.post_ahead(window, actions, index + 1)
                    elif action.op is Op.RECV and self._messages.was_posted(action):
                        continue
                    self._handlers[action.op](window, action)
                except Exception as error:
                    raise failed(action, error) from error

    def require_empty(self) -> None:
        """At the end of a window nothing of it is alive.

        Raises:
            RuntimeError: something is.
        """
        self._rank.buffers.require_empty()

    def abandon(self, window: Window, in_flight: Sequence[Action]) -> None:
        """Drop what the beginning of a window has made, and the messages that are under way because of it."""
        for action in in_flight:
            self._messages.receive(window, action)
        self._messages.abandon()

    def drain(self) -> None:
        """Wait for the messages still under way; afterwards nothing is alive."""
        self._messages.drain()
        self._rank.buffers.require_empty()

    def describe(self, action: Action) -> str:
        """The buffers that an action's stage and micro-batch own, with their shapes."""
        return self._rank.buffers.describe(action.stage, action.microbatch)

    def with_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> AbstractContextManager[None]:
        """Use a wrapped loss function for a while."""
        return self._compute.with_loss(wrap)

    def _reduce(self, window: Window, action: Action) -> None:
        """Start summing the stage's gradients over its replicas and twins; STEP waits for it."""
        holders = self.view.holders[action.stage]
        if len(holders) > 1:
            self.reductions += self.gradients[action.stage].reduce(self._transport, holders)

    def _step(self, window: Window, action: Action) -> None:
        """The optimizer steps for all stages of the rank together, at the last one's STEP."""
        self._stepped.add(action.stage)
        if len(self._stepped) == len(self.stages):
            self._stepped.clear()
            self._on_step(window)
