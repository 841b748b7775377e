"""Runs one rank's list of actions, with a table from op to handler, and the buffers that they own.

The executor knows no schedule by name. The lowering has placed RECV actions that post the messages which an action
needs; the handler of the action waits for them. A buffer is put once and taken once; a buffer that is left at the end
of a window is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from runner.engine.actions.compute import Compute
from runner.engine.actions.messages import Messages
from runner.engine.actions.opportunist import Opportunist
from runner.engine.context import RankContext
from runner.engine.options import EngineOptions
from runner.engine.step_ends import StepEnds
from runner.engine.window import Window
from runner.engine.work import Filler, Works
from runner.model.data import LossFunction
from runner.schedule.values import COMPUTE, Action, Op, Payload

__all__ = ["Executor"]


class Executor:
    """Runs compute and messages; ``ends`` does the optimizer's part of a step.

    Args:
        rank: the place of this rank, and what the parts share.
        works: the additions that wrap forwards and backwards.
        ends: ends the steps: sums gradients at REDUCE, updates at STEP, learns when the last loss is known.
        loss: the loss function, used by the last stage.
        options: the settings of the run.
    """

    def __init__(
        self, rank: RankContext, works: Works, ends: StepEnds, *, loss: LossFunction, options: EngineOptions
    ) -> None:
        self.current: Action | None = None  # the action that runs now
        self.begun = 0  # number of actions so far
        self._rank = rank
        self._ends = ends
        self._compute = Compute(
            rank,
            works,
            loss=loss,
            dtype=options.dtype,
            autocast=options.autocast,
            seed=options.seed,
            on_losses=ends.send_loss,
            metrics=options.metrics,
            figures=options.figures,
        )
        self._messages = Messages(rank, sizes_vary=options.sizes_vary, scatters=options.scatters)
        self._opportunist = Opportunist.of(rank, self._messages)
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._compute.forward,
            Op.R: self._compute.recompute,
            Op.B: self._compute.backward,
            Op.I: self._compute.backward_input,
            Op.W: self._compute.backward_weight,
            Op.SEND: partial(self._timed, self._messages.send),
            Op.RECV: partial(self._timed, self._messages.receive),
            Op.REDUCE: partial(self._timed, self._reduce),
            Op.STEP: self._step,
        }

    def attach(self, filler: Filler) -> None:
        """Let ``filler`` do its actions, and wrap the forwards and backwards."""
        self._compute.works = Works([*self._compute.works.all, filler])
        self._handlers[Op.FILL] = partial(self._fill, filler)

    @property
    def bytes_sent(self) -> dict[Payload, int]:
        """Bytes that were sent in training windows so far."""
        return self._messages.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, counts: dict[Payload, int]) -> None:
        self._messages.bytes_sent = counts

    def run(
        self, actions: Sequence[Action], failed: Callable[[Action, Exception], Exception], *, training: bool = True
    ) -> None:
        """Execute ``actions`` in order; the schedule's rule may change the order meanwhile.

        Args:
            actions: actions of windows that have begun.
            failed: makes the error to raise when an action fails.
            training: whether the windows are of training.
        """
        actions = list(actions)
        if self._rank.tensor_group is not None:
            self._rank.tensor_group.counts = training
        with torch.set_grad_enabled(training):
            for index in range(len(actions)):
                self.current = action = actions[index]
                self.begun += 1
                try:
                    if self._opportunist is not None and self._opportunist.prefers_forward(actions, index):
                        self.current = action = actions[index]
                    if action.op in COMPUTE:
                        start = self._rank.timeline.moment()
                        self._messages.post_ahead(actions, index + 1)
                        self._rank.timeline.add("messages", start)
                    elif action.op is Op.RECV and self._messages.was_posted(action):
                        continue
                    self._handlers[action.op](action)
                except Exception as error:
                    raise failed(action, error) from error

    def require_empty(self, window: Window) -> None:
        """Check that no buffer of a window that has ended is left.

        Raises:
            RuntimeError: there is one.
        """
        self._rank.buffers.require_empty(window.numbers)

    def abandon(self, in_flight: Sequence[Action]) -> None:
        """Drop everything that the beginning of a window has made, and the messages that it has caused."""
        for action in in_flight:
            self._messages.receive(action)
        self._messages.abandon()

    def drain(self) -> None:
        """Wait for the messages that are still on their way; afterwards no buffer may be left."""
        self._messages.drain()
        self._rank.buffers.require_empty()

    def describe(self, action: Action) -> str:
        """The buffers of an action's stage and micro-batch, with their shapes."""
        return self._rank.buffers.describe(action.stage, action.microbatch)

    def with_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> AbstractContextManager[None]:
        """Use a wrapped loss function within the context."""
        return self._compute.with_loss(wrap)

    def _timed(self, handle: Callable[[Action], None], action: Action) -> None:
        """Run the handler of a message; its time counts as the step's messages."""
        start = self._rank.timeline.moment()
        handle(action)
        self._rank.timeline.add("messages", start)

    def _reduce(self, action: Action) -> None:
        self._ends.reduce(self._rank.window_of(action), action.stage)

    def _step(self, action: Action) -> None:
        self._ends.step(self._rank.window_of(action), action.stage)

    def _fill(self, filler: Filler, action: Action) -> None:
        with self._rank.transport.exclusive():
            filler.do(action, self._rank.timeline)
