"""Several optimizer steps of one schedule as one stream."""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Schedule, shifted

__all__ = ["period", "repeat", "updates", "weight_versions"]

_WINDOWS = 6  # after which a stream repeats itself; one window more is one period more


def repeat(schedule: Schedule, windows: int) -> Schedule:
    """``windows`` optimizer steps of ``schedule``, one after the other; micro-batches are numbered through.

    Raises:
        ValueError: if ``windows`` is below 1, or ``schedule`` is such a stream and shall be a longer one.
    """
    if windows == 1:
        return schedule
    if windows < 1 or schedule.windows > 1:
        raise ValueError(f"windows = {windows} of a schedule of {schedule.windows}: at least 1, and of one window only")
    size = schedule.microbatches

    return replace(
        schedule,
        pipeline_of_microbatch=schedule.pipeline_of_microbatch * windows,
        window_of_microbatch=tuple(window for window in range(windows) for _ in range(size)),
        actions=tuple(
            tuple(shifted(action, window * size) for window in range(windows) for action in row)
            for row in schedule.actions
        ),
    )


def period(schedule: Schedule, costs: Costs | StageCosts) -> float:
    """Time from one optimizer step to the next where no rank waits for the others in between, in the costs' unit.

    Args:
        schedule: one window.
        costs: of its compute.
    """
    shorter, longer = (simulate(repeat(schedule, windows), costs).makespan for windows in (_WINDOWS, _WINDOWS + 1))
    return longer - shorter


def updates(schedule: Schedule) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Per rank, each optimizer step as ``(stage, window, index)``: it comes before that index of the rank's list.

    All stages of a rank step together, after the rank's last action of the window.
    """
    if not schedule.backward:
        return ((),) * schedule.ranks
    found = []
    for rank, row in enumerate(schedule.actions):
        last = {schedule.window_at(action): index + 1 for index, action in enumerate(row)}
        stages = schedule.stages_of(rank)
        found.append(tuple((stage, window, last[window]) for window in sorted(last) for stage in stages))
    return tuple(found)


def weight_versions(schedule: Schedule) -> tuple[float, ...]:
    """Per rank, most copies of its weights held at once, in whole rank shares.

    A flushed schedule keeps one version; a rank of several pipelines holds the stages of each, those that two of them
    have in common once.
    """
    return tuple(len(schedule.stages_of(rank)) / schedule.chunks for rank in range(schedule.ranks))
