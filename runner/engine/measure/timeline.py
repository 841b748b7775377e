"""Records what a rank did and when: compute events, and how the rest of a step's time was spent.

Clocks are ``time.perf_counter``, which processes of one machine share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Event", "StepTimes", "Timeline"]

_STEPS_WITH_EVENTS = 64


class Event(NamedTuple):
    """One compute action; times are seconds on the shared clock."""

    op: str
    stage: int
    microbatch: int | None
    start: float
    end: float


@dataclass(slots=True)
class StepTimes:
    """The times of one step on one rank, in seconds. The first four are moments on the shared clock, others durations.

    Args:
        start, end: begin and end of the engine's work on the step.
        first_compute, last_compute: begin of the first and end of the last compute action: the flushed span.
        compute: time in compute actions.
        waiting: time of waiting for activations and gradients: the bubble, including links.
        optimizer: time of clipping and update.
        waited_at_step: time of waiting, at STEP, for the loss and the sums of gradients.
    """

    step: int
    start: float = 0.0
    end: float = 0.0
    first_compute: float = 0.0
    last_compute: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    optimizer: float = 0.0
    waited_at_step: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        return (
            self.start,
            self.end,
            self.first_compute,
            self.last_compute,
            self.compute,
            self.waiting,
            self.optimizer,
            self.waited_at_step,
        )


@dataclass
class Timeline:
    """The times of every step of a run, and the events of the last steps."""

    steps: list[StepTimes] = field(default_factory=list)
    events: deque[tuple[int, list[Event]]] = field(default_factory=lambda: deque(maxlen=_STEPS_WITH_EVENTS))
    current: StepTimes = field(default_factory=lambda: StepTimes(-1))
    _open: list[Event] = field(default_factory=list)

    def begin(self, step: int, now: float) -> None:
        self.current = StepTimes(step, start=now)
        self._open = []

    def compute(self, op: str, stage: int, microbatch: int | None, start: float, end: float) -> None:
        self._open.append(Event(op, stage, microbatch, start, end))
        self.current.compute += end - start

    def finish(self, now: float) -> None:
        """Close the step; forward-only windows are not kept."""
        self.current.end = now
        if self._open:
            self.current.first_compute = self._open[0].start
            self.current.last_compute = self._open[-1].end
        self.steps.append(self.current)
        self.events.append((self.current.step, self._open))
        self._open = []
