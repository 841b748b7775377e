"""The steady state of a stream: how long one optimizer step takes where steps run into each other."""

from __future__ import annotations

from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Program, Schedule

__all__ = ["period"]


def period(shorter: Schedule | Program, longer: Schedule | Program, costs: Costs | StageCosts) -> float:
    """Time from one optimizer step to the next, in the unit of the costs.

    Args:
        shorter: a stream of n windows, after which it repeats itself.
        longer: the same stream of more windows, commonly n + 1. Programs are played with their reductions and steps,
            schedules without.
        costs: durations.
    """
    more = _windows(longer) - _windows(shorter)
    return (simulate(longer, costs).makespan - simulate(shorter, costs).makespan) / more


def _windows(view: Schedule | Program) -> int:
    return view.schedule.windows if isinstance(view, Program) else view.windows
