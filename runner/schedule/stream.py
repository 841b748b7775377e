"""A schedule as a stream: the actions of each rank for any number of optimizer steps.

A window is the micro-batches of one optimizer step; windows are numbered from 0. A *segment* is the part of a rank's
list that begins with its first compute of a window and ends before its first compute of the next window. It may contain
actions of earlier windows that are still under way. The first segments are the *prologue*, in which the pipeline fills.
After it, the *body* repeats. If no further window begins, the *drain* ends the windows that have begun: it consists of
their actions in the segments that would follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runner.schedule.values import Action, Op, Program, Schedule, shifted

__all__ = ["Stream", "repeat", "streams_of", "updates", "versions_held"]

Segment = tuple[Action, ...]


@dataclass(frozen=True)
class Stream:
    """The endless list of actions of one rank.

    Args:
        microbatches: number of micro-batches of one window.
        prologue: the segments of windows 0, 1, ...
        body: the segments that repeat after the prologue; their windows have the numbers of the first repetition.
        overlap: the number of segments, after its own, in which a window may still have actions.
    """

    microbatches: int
    prologue: tuple[Segment, ...]
    body: tuple[Segment, ...]
    overlap: int

    def segment(self, window: int) -> Segment:
        """The actions from the rank's first compute of ``window`` until its first compute of the next window."""
        if window < len(self.prologue):
            return self.prologue[window]
        rounds, number = divmod(window - len(self.prologue), len(self.body))
        return tuple(self._later(action, rounds * len(self.body)) for action in self.body[number])

    def drain(self, windows: int) -> Segment:
        """The actions of the first ``windows`` windows that come after the segments of these windows."""
        following = (self.segment(window) for window in range(windows, windows + self.overlap))
        return tuple(action for segment in following for action in segment if self.window_of(action) < windows)

    def window_of(self, action: Action) -> int:
        """The window in which ``action`` is done."""
        if action.microbatch is None or action.op is Op.FILL:
            return action.window
        return action.microbatch // self.microbatches

    def _later(self, action: Action, windows: int) -> Action:
        """``action`` for the window that comes ``windows`` windows later."""
        if not windows:
            return action
        if action.microbatch is not None:
            action = shifted(action, windows * self.microbatches)
        return action._replace(window=action.window + windows) if _has_window(action) else action


def streams_of(view: Schedule | Program) -> tuple[Stream, ...]:
    """The stream of each rank; all prologues have the same length.

    Args:
        view: a schedule or program with enough windows to show how it repeats. If windows overlap, at least two
            segments must be equal; otherwise all of its windows repeat together.

    Raises:
        ValueError: the windows of ``view`` overlap, and no segment equals the one before it.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    size = schedule.microbatches // schedule.windows
    cut = [_segments(row, schedule) for row in view.actions]
    if not schedule.is_asynchronous:
        return tuple(Stream(size, (), segments, 0) for segments in cut)
    whole = [segments[:-1] for segments in cut]  # the last segment also contains the drain
    ranks = [Stream(size, segments, (), 0) for segments in whole]
    first = max(_first_repeated(stream) for stream in ranks)
    if first + 1 >= len(whole[0]):
        raise ValueError(f"{schedule.name}: {schedule.windows} windows are too few to show how the schedule repeats")
    overlap = max(_overlap(stream) for stream in ranks)
    return tuple(Stream(size, segments[:first], segments[first : first + 1], overlap) for segments in whole)


def _segments(row: Sequence[Action], schedule: Schedule) -> tuple[Segment, ...]:
    """Cut a rank's list before its first compute of each window.

    A receive for a window that has not begun belongs to that window's segment, so that the rank need not know of the
    window before its segment begins.
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
    """The number of the first segment from which all segments are equal, apart from the numbers of their windows."""
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
    """``schedule`` for ``windows`` optimizer steps; micro-batches are numbered over all of them.

    Args:
        schedule: a schedule of one window, or an asynchronous one with enough windows to show how it repeats.
        windows: number of windows of the result, at least 1.

    Raises:
        ValueError: ``windows`` is below 1, or ``schedule`` is a flushed schedule that has several windows already.
    """
    if windows == schedule.windows or (windows == 1 and not schedule.is_asynchronous):
        return schedule
    if windows < 1 or (schedule.windows > 1 and not schedule.is_asynchronous):
        raise ValueError(
            f"windows = {windows}: must be at least 1, and a flushed schedule to be repeated must have one window, "
            f"not {schedule.windows}"
        )
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
    """The optimizer steps of each rank, as ``(stage, window, index)``; a step comes before this index of its compute.

    All stages of a rank are updated together, after the rank's last action of the window. In an asynchronous schedule,
    each stage is updated by itself, after its last weight gradient of the window.
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
    """For each rank, the largest number of versions of its weights held at once, in units of a rank's whole share.

    A version is held from the optimizer step that makes it until a newer version exists and its last reader has ended.
    A flushed schedule holds one version. With several pipelines, a rank holds its stages of all of them; a stage that
    two pipelines put on it counts once, unless each trains weights of its own.
    """
    if not schedule.is_asynchronous:
        return tuple(
            sum(1 + schedule.older_versions(stage) for stage in schedule.stages_of(rank)) / schedule.chunks
            for rank in range(schedule.ranks)
        )
    return tuple(
        max(map(sum, _held_at_steps(schedule, rank, steps)), default=len(schedule.stages_of(rank))) / schedule.chunks
        for rank, steps in enumerate(updates(schedule))
    )


def _held_at_steps(schedule: Schedule, rank: int, steps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, ...]]:
    """Yield, after each optimizer step of a rank, the number of versions of each of its stages that are held."""
    held = dict.fromkeys(schedule.stages_of(rank), 1)
    for stage, window, _ in steps:
        newest = window + 1
        held[stage] = min(newest, schedule.older_versions(stage)) + 1
        yield tuple(held.values())
