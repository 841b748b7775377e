"""The steady state of a stream: the time of one optimizer step if steps overlap at their ends."""

from __future__ import annotations

from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.stream import repeat
from runner.schedule.values import Program, Schedule

__all__ = ["period"]

_WINDOWS = 6  # after these windows, a stream repeats itself, and one more window adds one period


def period(view: Schedule | Program, costs: Costs | StageCosts) -> float:
    """The time from one optimizer step to the next if no rank waits for all others in between.

    It is the time, in the unit of the costs, that one more window adds to a stream long enough to repeat itself.

    Args:
        view: one window, or an asynchronous stream. For a program, messages, reductions and optimizer steps are played
            too; for a schedule, only its compute.
        costs: the durations.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    windows = _WINDOWS + schedule.windows
    shorter, longer = (repeat(schedule, number) for number in (windows, windows + 1))
    if isinstance(view, Program):
        return simulate(lower(longer), costs).makespan - simulate(lower(shorter), costs).makespan
    return simulate(longer, costs).makespan - simulate(shorter, costs).makespan
