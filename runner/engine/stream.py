"""One rank's actions, step by step: training as a stream of windows, and the window that goes forward alone."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engine.context import RankView
from runner.schedule.values import CURVATURE, Action, Op, Program, Schedule, shifted

__all__ = ["Stream"]


class Stream:
    """What a rank does in which step.

    Args:
        view: where the rank stands.
        training: the lowered program of one step, or of several, after which it repeats itself.
        forward_only: that of a validation window.
        microbatches: of a step.
    """

    def __init__(self, view: RankView, training: Program, forward_only: Program, microbatches: int) -> None:
        self._view, self._microbatches = view, microbatches
        self._programs = {True: training, False: forward_only}
        self._windows = [training.of_window(view.position, number) for number in range(training.schedule.windows)]

    @property
    def windows(self) -> int:
        """Steps after which training repeats itself."""
        return len(self._windows)

    def window(self, step: int) -> int:
        """The number of a step within the program."""
        return step % self.windows

    def program(self, training: bool) -> Program:
        return self._programs[training]

    def schedule(self, training: bool) -> Schedule:
        return self._programs[training].schedule

    def training(self, step: int) -> Sequence[Action]:
        """All actions of a step."""
        return self._windows[self.window(step)]

    def without_update(self) -> Sequence[Action]:
        """Those of the first step that change no weights, and none of K-FAC's work."""
        left_out = {Op.REDUCE, Op.STEP, *CURVATURE}
        return [action for action in self._windows[0] if action.op not in left_out]

    def forward_only(self) -> Sequence[Action]:
        return self._programs[False].actions[self._view.position]

    def in_program(self, action: Action, step: int) -> Action:
        """An action of a training step, whose micro-batches count from 0, as the program numbers it."""
        if action.microbatch is None or action.op in CURVATURE:
            return action
        return shifted(action, self.window(step) * self._microbatches)

    def own_losses(self, training: bool) -> list[int]:
        """The micro-batches whose last stage is on this rank."""
        schedule = self.schedule(training)
        ends = enumerate(schedule.rank_of(schedule.stages - 1, m) for m in range(self._microbatches))
        return [number for number, position in ends if position == self._view.position]
