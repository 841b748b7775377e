"""The steady state of a stream: how long one optimizer step takes where steps run into each other."""

from __future__ import annotations

from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.stream import repeat
from runner.schedule.values import Program, Schedule

__all__ = ["period"]

_WINDOWS = 6  # after which a stream repeats itself; one window more is one period more


def period(view: Schedule | Program, costs: Costs | StageCosts) -> float:
    """Time from one optimizer step to the next where no rank waits for the others in between, in the costs' unit.

    It is what one window more adds to a stream that is long enough to repeat itself.

    Args:
        view: one window, or an asynchronous stream. Of a program, messages, reductions and optimizer steps are played
            as well; of a schedule its compute.
        costs: durations.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    windows = _WINDOWS + schedule.windows
    shorter, longer = (repeat(schedule, number) for number in (windows, windows + 1))
    if isinstance(view, Program):
        return simulate(lower(longer), costs).makespan - simulate(lower(shorter), costs).makespan
    return simulate(longer, costs).makespan - simulate(shorter, costs).makespan
