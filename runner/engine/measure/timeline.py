"""Records what a rank did and when: compute events, and how the rest of a step's time was spent.

Seconds are those of ``time.perf_counter``, which processes of one machine share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.engine.measure.clocks import Clock, HostClock

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
        messages: time of starting to send and to receive, and of starting sums of gradients.
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
    messages: float = 0.0

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
            self.messages,
        )


@dataclass
class Timeline:
    """The times of every step of a run, and the events of the last steps.

    Args:
        clock: what tells the moments; of a device's work, only the device's own clock can.
    """

    clock: Clock = field(default_factory=HostClock)
    steps: list[StepTimes] = field(default_factory=list)
    events: deque[tuple[int, list[Event]]] = field(default_factory=lambda: deque(maxlen=_STEPS_WITH_EVENTS))
    current: StepTimes = field(default_factory=lambda: StepTimes(-1))
    _start: Any = None
    _open: list[tuple[str, int, int | None, Any, Any]] = field(default_factory=list)
    _parts: list[tuple[str, Any, Any]] = field(default_factory=list)

    def moment(self) -> Any:
        """Now, for :meth:`compute` and :meth:`add`."""
        return self.clock.moment()

    def begin(self, step: int) -> None:
        self._settle()  # what was done after the last step's end belongs to it
        self.current = StepTimes(step)
        self._start = self.moment()
        self._open = []

    def compute(self, op: str, stage: int, microbatch: int | None, start: Any) -> None:
        """Note a compute action that began at this moment and ends now."""
        end = self.moment()
        self._open.append((op, stage, microbatch, start, end))
        self._parts.append(("compute", start, end))

    def add(self, part: str, start: Any, end: Any = None) -> None:
        """Add the time between two moments, the second of which may be now, to a part of :class:`StepTimes`."""
        self._parts.append((part, start, self.moment() if end is None else end))

    def finish(self) -> None:
        """Close the step; forward-only windows are not kept."""
        end = self.moment()
        self.current.start, self.current.end = self.clock.seconds([self._start, end])
        seconds = iter(self.clock.seconds([moment for *_, start, end in self._open for moment in (start, end)]))
        events = [Event(op, stage, number, next(seconds), next(seconds)) for op, stage, number, _, _ in self._open]
        self._settle()
        if events:
            self.current.first_compute = events[0].start
            self.current.last_compute = events[-1].end
        self.steps.append(self.current)
        self.events.append((self.current.step, events))
        self._open = []

    def _settle(self) -> None:
        """Add what is noted to the step's parts."""
        seconds = iter(self.clock.seconds([moment for _, *both in self._parts for moment in both]))
        for part, _, _ in self._parts:
            begin, end = next(seconds), next(seconds)
            setattr(self.current, part, getattr(self.current, part) + end - begin)
        self._parts = []
