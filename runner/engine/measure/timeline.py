"""Records what a rank did and when: compute events, and how the rest of a step's time was spent.

Seconds are those of ``time.perf_counter``, which processes of one machine share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.engine.measure.clocks import Clock, HostClock

__all__ = ["Event", "StepTimes", "Timeline"]

_STEPS_WITH_EVENTS = 64
_WITH_MOVES = ("compute", "optimizer")  # the parts in which tensors are moved to the host and back


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
        moved_in_compute, moved_in_optimizer: the shares of ``compute`` and ``optimizer`` in which offloading moved
            tensors to the host's memory or back.
        moved_between: time of such moves outside both.
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
    moved_in_compute: float = 0.0
    moved_in_optimizer: float = 0.0
    moved_between: float = 0.0

    @property
    def moved(self) -> float:
        """Time in which offloading moved tensors to the host's memory or back."""
        return self.moved_in_compute + self.moved_in_optimizer + self.moved_between

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
            self.moved_in_compute,
            self.moved_in_optimizer,
            self.moved_between,
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
    _moves: list[tuple[Any, Any]] = field(default_factory=list)
    _is_moving: bool = False

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

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within the context, offloading moves tensors to the host's memory or back; a move in a move is part of it."""
        if self._is_moving:
            yield
            return
        self._is_moving, start = True, self.moment()
        try:
            yield
        finally:
            self._is_moving = False
            self._moves.append((start, self.moment()))

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
        spans = self._spans([(start, end) for _, start, end in self._parts])
        moves = self._spans(self._moves)
        parts = [(name, *span) for (name, *_), span in zip(self._parts, spans, strict=True)]
        noted = [(name, end - begin) for name, begin, end in parts]
        for name, seconds in [*noted, *_placed(moves, [part for part in parts if part[0] in _WITH_MOVES])]:
            setattr(self.current, name, getattr(self.current, name) + seconds)
        self._parts, self._moves = [], []

    def _spans(self, moments: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        seconds = self.clock.seconds([moment for both in moments for moment in both])
        return list(zip(seconds[::2], seconds[1::2], strict=True))


def _placed(moves: list[tuple[float, float]], parts: list[tuple[str, float, float]]) -> Iterator[tuple[str, float]]:
    """For every move the field of :class:`StepTimes` that counts it, by the part in whose time its middle is."""
    parts = sorted(parts, key=lambda part: part[1])
    begins = [begin for _, begin, _ in parts]
    for begin, end in moves:
        middle = (begin + end) / 2
        begun = bisect_right(begins, middle)
        is_inside = begun > 0 and middle <= parts[begun - 1][2]
        yield f"moved_in_{parts[begun - 1][0]}" if is_inside else "moved_between", end - begin
