"""Writes timelines as JSON in Chrome's trace format, for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.schedule.render.events import BESIDE, Event, events_of
from runner.schedule.render.titles import title_of
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Program, Schedule

__all__ = ["schedules_trace", "timeline_trace", "timelines_trace", "to_trace"]


def to_trace(view: Schedule | Program, costs: Costs | StageCosts, *, seconds_per_unit: float = 1e-3) -> dict[str, Any]:
    """The simulated timeline of ``view`` in the trace format.

    Args:
        view: the schedule or program to simulate.
        costs: its durations, in any unit.
        seconds_per_unit: length of that unit in seconds; if the unit has no meaning, a millisecond is a good choice.
    """
    return timeline_trace(events_of(view, costs), seconds_per_unit=seconds_per_unit)


def schedules_trace(drawn: Sequence[tuple[Schedule, Costs]], *, seconds_per_unit: float = 1e-3) -> dict[str, Any]:
    """The simulated timelines of schedules in one trace; if there are several, each is a group with its title."""
    if len(drawn) == 1:
        return to_trace(*drawn[0], seconds_per_unit=seconds_per_unit)
    trace: list[dict[str, Any]] = []
    for group, (schedule, costs) in enumerate(drawn):
        trace += _group(group, title_of(schedule, costs), events_of(schedule, costs), 1e6 * seconds_per_unit)
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def timeline_trace(events: Iterable[Event], *, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """A timeline in the trace format; each rank has one track for compute and, if needed, one for messages.

    Args:
        events: the timeline's events, for example measured ones.
        seconds_per_unit: length of the unit of their times, in seconds.
    """
    return {"traceEvents": _process(0, events, 1e6 * seconds_per_unit), "displayTimeUnit": "ms"}


def timelines_trace(timelines: Mapping[str, Iterable[Event]]) -> dict[str, Any]:
    """Several timelines, in seconds, in one trace; each of them is a group of tracks with its name."""
    trace: list[dict[str, Any]] = []
    for group, (name, events) in enumerate(timelines.items()):
        trace += _group(group, name, events, 1e6)
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _group(group: int, name: str, events: Iterable[Event], microseconds: float) -> list[dict[str, Any]]:
    head = {"name": "process_name", "ph": "M", "pid": group, "tid": 0, "args": {"name": name}}
    return [head, *_process(group, events, microseconds)]


def _process(group: int, events: Iterable[Event], microseconds: float) -> list[dict[str, Any]]:
    """The tracks of one group, names first; ``microseconds`` is the length of the unit of the events' times."""
    tracks: dict[int, str] = {}
    complete = []
    for event in events:
        beside = event.op in BESIDE
        track = 2 * event.rank + beside
        tracks[track] = f"rank {event.rank}" + (" messages" if beside else "")
        complete.append(
            {
                "name": event.label,
                "cat": event.op,
                "ph": "X",
                "pid": group,
                "tid": track,
                "ts": event.start * microseconds,
                "dur": (event.end - event.start) * microseconds,
                "args": {"stage": event.stage, "microbatch": event.microbatch},
            }
        )
    names: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": group, "tid": track, "args": {"name": name}}
        for track, name in sorted(tracks.items())
    ]
    return names + complete
