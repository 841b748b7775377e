"""A schedule as a stream: what each rank does from one optimizer step to the next, for as many steps as there are.

Windows, the micro-batches of one optimizer step each, are numbered from 0. A *segment* of a rank is the part of its
list from its first compute of a window to its last before that of the next window; it may hold actions of windows
before, which are still under way. The first segments are the *prologue*, in which the pipeline fills. Then the *body*
repeats. What is left of the windows begun, when no further one begins, is the *drain*: the actions of these windows in
the segments that would follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runner.schedule.values import Action, Op, Program, Schedule, shifted

__all__ = ["Stream", "repeat", "streams_of", "updates", "versions_held"]

Segment = tuple[Action, ...]


@dataclass(frozen=True)
class Stream:
    """One rank's endless list.

    Args:
        microbatches: of one window.
        prologue: segments of windows 0, 1, ...
        body: segments of the windows after it, over and over; numbered as if the first of them came directly after the
            prologue.
        overlap: how many segments later than its own a window's last action may come.
    """

    microbatches: int
    prologue: tuple[Segment, ...]
    body: tuple[Segment, ...]
    overlap: int

    def segment(self, window: int) -> Segment:
        """What the rank does from its first compute of ``window`` on, before the first of the next window."""
        if window < len(self.prologue):
            return self.prologue[window]
        rounds, number = divmod(window - len(self.prologue), len(self.body))
        return tuple(self._later(action, rounds * len(self.body)) for action in self.body[number])

    def drain(self, windows: int) -> Segment:
        """What is left of the first ``windows`` windows after their segments."""
        following = (self.segment(window) for window in range(windows, windows + self.overlap))
        return tuple(action for segment in following for action in segment if self.window_of(action) < windows)

    def window_of(self, action: Action) -> int:
        """The window that ``action`` is done in."""
        if action.microbatch is None or action.op is Op.FILL:
            return action.window
        return action.microbatch // self.microbatches

    def _later(self, action: Action, windows: int) -> Action:
        """``action`` of the window that comes so many later."""
        if not windows:
            return action
        if action.microbatch is not None:
            action = shifted(action, windows * self.microbatches)
        return action._replace(window=action.window + windows) if _has_window(action) else action


def streams_of(view: Schedule | Program) -> tuple[Stream, ...]:
    """Each rank's stream, all with prologues of one length.

    Args:
        view: as many windows as show its repetition: two equal segments at least where windows overlap. Where they do
            not, all of its windows repeat together.

    Raises:
        ValueError: the windows of ``view`` overlap, and no segment equals the one before it.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    size = schedule.microbatches // schedule.windows
    cut = [_segments(row, schedule) for row in view.actions]
    if not schedule.is_asynchronous:
        return tuple(Stream(size, (), segments, 0) for segments in cut)
    whole = [segments[:-1] for segments in cut]  # the last one holds the drain besides
    ranks = [Stream(size, segments, (), 0) for segments in whole]
    first = max(_first_repeated(stream) for stream in ranks)
    if first + 1 >= len(whole[0]):
        raise ValueError(f"{schedule.name}: {schedule.windows} windows do not show how it repeats itself")
    overlap = max(_overlap(stream) for stream in ranks)
    return tuple(Stream(size, segments[:first], segments[first : first + 1], overlap) for segments in whole)


def _segments(row: Sequence[Action], schedule: Schedule) -> tuple[Segment, ...]:
    """A rank's list, cut before its first compute of each window.

    A receive for a window that has not begun belongs to that window's segment: the rank need not know of the window
    before it has done what comes before.
    """
    segments: list[list[Action]] = [[] for _ in range(schedule.windows)]
    latest = 0
    for action in row:
        window = schedule.window_at(action)
        if action.op is not Op.RECV:
            latest = max(latest, window)
        segments[max(latest, window)].append(action)
    return tuple(map(tuple, segments))


def _first_repeated(stream: Stream) -> int:
    """The first segment from which on each equals the one before it, a window later."""
    first = len(stream.prologue) - 1
    while first > 0:
        later = tuple(stream._later(action, 1) for action in stream.prologue[first - 1])
        if later != stream.prologue[first]:
            break
        first -= 1
    return first


def _overlap(stream: Stream) -> int:
    pairs = ((number, action) for number, segment in enumerate(stream.prologue) for action in segment)
    return max((number - stream.window_of(action) for number, action in pairs), default=0)


def _has_window(action: Action) -> bool:
    return action.microbatch is None or action.op is Op.FILL


def repeat(schedule: Schedule, windows: int) -> Schedule:
    """``schedule`` for so many optimizer steps; micro-batches are numbered through.

    Args:
        schedule: of one window, or an asynchronous one of as many as show its repetition.
        windows: of the result, at least 1.

    Raises:
        ValueError: if ``windows`` is below 1, or ``schedule`` is a flushed one of several windows already.
    """
    if windows == schedule.windows or (windows == 1 and not schedule.is_asynchronous):
        return schedule
    if windows < 1 or (schedule.windows > 1 and not schedule.is_asynchronous):
        raise ValueError(f"windows = {windows} of a schedule of {schedule.windows}: at least 1, and of one window only")
    size = schedule.microbatches // schedule.windows
    rows = []
    for stream in streams_of(schedule):
        segments = [*map(stream.segment, range(windows)), stream.drain(windows)]
        rows.append(tuple(action for segment in segments for action in segment))
    return replace(
        schedule,
        pipeline_of_microbatch=schedule.pipeline_of_microbatch[:size] * windows,
        window_of_microbatch=tuple(window for window in range(windows) for _ in range(size)),
        actions=tuple(rows),
    )


def updates(schedule: Schedule) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Per rank, each optimizer step as ``(stage, window, index)``: it comes before that index of the rank's compute.

    All stages of a rank step together, after the rank's last action of the window; of an asynchronous schedule each
    steps by itself, after its last gradient of the window.
    """
    if not schedule.backward:
        return ((),) * schedule.ranks
    if schedule.is_asynchronous:
        return tuple(tuple(_own_updates(schedule, row)) for row in schedule.compute)
    found = []
    for rank, row in enumerate(schedule.compute):
        last = {schedule.window_at(action): index + 1 for index, action in enumerate(row)}
        stages = schedule.stages_of(rank)
        found.append(tuple((stage, window, last[window]) for window in sorted(last) for stage in stages))
    return tuple(found)


def _own_updates(schedule: Schedule, row: Iterable[Action]) -> Iterator[tuple[int, int, int]]:
    last: dict[tuple[int, int], int] = {}
    for index, action in enumerate(row):
        if action.op in (Op.B, Op.W):
            last[action.stage, schedule.window_at(action)] = index + 1
    for (stage, window), index in sorted(last.items(), key=lambda one: one[1]):
        yield stage, window, index


def versions_held(schedule: Schedule) -> tuple[float, ...]:
    """Per rank, most copies of its weights held at once, in whole rank shares.

    A version lives from the optimizer step that makes it until a newer one is there and its last reader has ended. A
    flushed schedule keeps one; a rank of several pipelines holds the stages of each, those that two of them have in
    common once.
    """
    if not schedule.is_asynchronous:
        return tuple(len(schedule.stages_of(rank)) / schedule.chunks for rank in range(schedule.ranks))
    return tuple(
        max(map(sum, _held_at_steps(schedule, rank, steps)), default=len(schedule.stages_of(rank))) / schedule.chunks
        for rank, steps in enumerate(updates(schedule))
    )


def _held_at_steps(schedule: Schedule, rank: int, steps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, ...]]:
    """After each optimizer step of a rank, how many versions of each of its stages are held."""
    held = dict.fromkeys(schedule.stages_of(rank), 1)
    for stage, window, _ in steps:
        newest = window + 1
        held[stage] = newest - schedule.version_read(stage, newest) + 1
        yield tuple(held.values())
