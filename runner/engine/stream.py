"""One rank's actions, step by step: training as a stream of windows, and the window that goes forward alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.engine.context import RankView
from runner.schedule.stream import streams_of
from runner.schedule.values import Action, Op, Program, Schedule

__all__ = ["RankStream"]


class RankStream:
    """What a rank does in which step.

    Windows may overlap. Then actions of several steps are under way, and the numbers of their micro-batches count round
    and round: those of step k begin at ``k % places`` times the micro-batches of a step. Without overlap there is one
    place, and every step's micro-batches count from 0.

    Args:
        view: where the rank stands.
        training: the lowered program of one step, or of several, after which it repeats itself.
        forward_only: that of a validation window.
        microbatches: of a step.
    """

    def __init__(self, view: RankView, training: Program, forward_only: Program, microbatches: int) -> None:
        self._view, self._microbatches = view, microbatches
        self._programs = {True: training, False: forward_only}
        self._stream = streams_of(training)[view.position]
        self.overlap = self._stream.overlap
        self._known: dict[tuple[int, int], Sequence[Action]] = {}

    @property
    def interval(self) -> int:
        """Steps after which training repeats itself."""
        return self.schedule(training=True).interval

    @property
    def places(self) -> int:
        """How many steps may be under way at once."""
        return self.overlap + 1

    def window(self, step: int) -> int:
        """The number of a step within the program's repetition."""
        return step % self.interval

    def program(self, training: bool) -> Program:
        return self._programs[training]

    def schedule(self, training: bool) -> Schedule:
        return self._programs[training].schedule

    def place(self, step: int) -> int:
        """Which of the places a step has."""
        return step % self.places

    def training(self, step: int, since: int = 0) -> Sequence[Action]:
        """What the rank does when a step begins; where windows overlap, also for steps before it.

        Args:
            step: its index.
            since: the first step after the pipeline was empty the last time.
        """
        segment = step - since if self.overlap else self.window(step)
        alike = min(segment, len(self._stream.prologue)) if self.overlap else segment
        key = alike, self.place(step)
        if key not in self._known:
            self._known[key] = self._placed(self._stream.segment(segment), since)
        return self._known[key]

    def drain(self, steps: int, since: int) -> Sequence[Action]:
        """What is left to do of the steps from ``since`` on, ``steps`` of them, when no further one begins."""
        return self._placed(self._stream.drain(steps), since)

    def without_update(self) -> Sequence[Action]:
        """The actions of a first step that change no weights, and no fills: an empty pipeline to an empty one."""
        left_out = {Op.REDUCE, Op.STEP, Op.FILL}
        actions = self.training(0) if not self.overlap else [*self.training(0), *self.drain(1, 0)]
        return [action for action in actions if action.op not in left_out]

    def forward_only(self) -> Sequence[Action]:
        return self._programs[False].actions[self._view.position]

    def in_program(self, action: Action, step: int, since: int = 0) -> Action:
        """An action that is done in a training step, as the program numbers it."""
        if action.op is Op.FILL:
            return action
        places, size = self.places, self._microbatches
        place = action.window if action.microbatch is None else action.microbatch // size
        window = step - (step - place) % places  # the latest step of that place
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
        """Actions of a stream that began with the step ``since``, numbered as those under way are."""
        return tuple(self._with_place(action, since) for action in actions)

    def _with_place(self, action: Action, since: int) -> Action:
        size = self._microbatches
        if action.op is Op.FILL:  # the numbers that its micro-batches had in the step that they were of
            return action._replace(microbatch=None if action.microbatch is None else action.microbatch % size)
        if action.microbatch is None:
            return action._replace(window=self.place(since + action.window))
        window, number = divmod(action.microbatch, size)
        return action._replace(microbatch=self.place(since + window) * size + number)
