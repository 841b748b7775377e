"""The actions of one rank, step by step: for training, a stream of windows; for validation, a forward-only window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.engine.rank_view import RankView
from runner.schedule.stream import streams_of
from runner.schedule.values import Action, Op, Program, Schedule

__all__ = ["RankStream"]


class RankStream:
    """The actions of a rank, by step.

    Windows may overlap. Then actions of several steps are under way at the same time. Each of these steps has a place,
    a number from 0 to ``places - 1``, and its micro-batches have their own numbers in actions: those of step k begin at
    ``k % places`` times the number of micro-batches of a step. Without overlap there is one place, and the
    micro-batches of every step are numbered from 0.

    Args:
        view: the place of the rank in its pipeline.
        training: the lowered program of one training step, or of the steps after which training repeats itself.
        forward_only: the lowered program of a validation window.
        microbatches: number of micro-batches of a step.
    """

    def __init__(self, view: RankView, training: Program, forward_only: Program, microbatches: int) -> None:
        self._view, self._microbatches = view, microbatches
        self._programs = {True: training, False: forward_only}
        self._stream = streams_of(training)[view.position]
        self.overlap = self._stream.overlap
        self._known: dict[tuple[int, int], Sequence[Action]] = {}

    @property
    def interval(self) -> int:
        """The number of steps after which training repeats itself."""
        return self.schedule(training=True).interval

    @property
    def places(self) -> int:
        """The number of steps that may be under way at the same time."""
        return self.overlap + 1

    def window(self, step: int) -> int:
        """The window of the program that a step repeats."""
        return step % self.interval

    def program(self, training: bool) -> Program:
        return self._programs[training]

    def schedule(self, training: bool) -> Schedule:
        return self._programs[training].schedule

    def place(self, step: int) -> int:
        """The place of a step."""
        return step % self.places

    def training(self, step: int, since: int = 0) -> Sequence[Action]:
        """The actions from the beginning of a step to that of the next; if windows overlap, also some of earlier steps.

        Args:
            step: the step's index.
            since: the step that was the first one to begin after the pipeline was last empty.
        """
        segment = step - since if self.overlap else self.window(step)
        alike = min(segment, len(self._stream.prologue)) if self.overlap else segment
        key = alike, self.place(step)
        if key not in self._known:
            self._known[key] = self._placed(self._stream.segment(segment), since)
        return self._known[key]

    def drain(self, steps: int, since: int) -> Sequence[Action]:
        """The actions that are left of the ``steps`` steps from ``since`` on if no further step begins."""
        return self._placed(self._stream.drain(steps), since)

    def without_update(self) -> Sequence[Action]:
        """The actions of one whole step, from an empty pipeline to an empty one, without updates and fills."""
        left_out = {Op.REDUCE, Op.STEP, Op.FILL}
        actions = self.training(0) if not self.overlap else [*self.training(0), *self.drain(1, 0)]
        return [action for action in actions if action.op not in left_out]

    def forward_only(self) -> Sequence[Action]:
        return self._programs[False].actions[self._view.position]

    def in_program(self, action: Action, step: int, since: int = 0) -> Action:
        """The action of the program that corresponds to ``action``, which is done in a training step.

        Args:
            action: an action that :meth:`training` or :meth:`drain` returned.
            step: the step in which it is done.
            since: the step that was the first one to begin after the pipeline was last empty.
        """
        if action.op is Op.FILL:
            return action
        places, size = self.places, self._microbatches
        place = action.window if action.microbatch is None else action.microbatch // size
        window = step - (step - place) % places  # the latest step that has this place
        own = step - since if self.overlap else self.window(step)
        shown = min(own, len(self._stream.prologue)) - (step - window) if self.overlap else own
        if action.microbatch is None:
            return action._replace(window=shown)
        return action._replace(microbatch=shown * size + action.microbatch % size)

    def own_losses(self, training: bool) -> list[int]:
        """The micro-batches whose last stage is on this rank."""
        schedule = self.schedule(training)
        ends = enumerate(schedule.rank_of(schedule.stages - 1, m) for m in range(self._microbatches))
        return [number for number, position in ends if position == self._view.position]

    def _placed(self, actions: Iterable[Action], since: int) -> Sequence[Action]:
        """Actions of a stream that began with step ``since``, with the numbers that their steps' places give them."""
        return tuple(self._with_place(action, since) for action in actions)

    def _with_place(self, action: Action, since: int) -> Action:
        size = self._microbatches
        if action.op is Op.FILL:  # a fill keeps the number that its micro-batch had in its own step
            return action._replace(microbatch=None if action.microbatch is None else action.microbatch % size)
        if action.microbatch is None:
            return action._replace(window=self.place(since + action.window))
        window, number = divmod(action.microbatch, size)
        return action._replace(microbatch=self.place(since + window) * size + number)
