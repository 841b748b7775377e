"""Ranks that share cores: spans counted by hand, and bounds that hold for every schedule."""

from __future__ import annotations

import pytest

from runner.schedule.catalogue.registry import SPECS, build
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.simulation.cores import span_on_cores
from runner.schedule.values import Schedule

NAMES = [name for name, spec in SPECS.items() if not spec.one_rank and name != "from_file"]
COSTS = Costs(F=1.0, B=2.25, I=1.25, W=1.0)


def stage_costs(schedule: Schedule, costs: Costs) -> StageCosts:
    return costs.per_stage(schedule.stages, schedule.chunks, schedule.parts, schedule.filling)


@pytest.mark.parametrize(("at_once", "span"), [(2, 9.0), (1, 12.0), (0.5, 24.0), (1.5, 12.0)])
def test_two_ranks_and_two_micro_batches_of_gpipe(at_once: float, span: float) -> None:
    """F takes 1 and B 2; alone, the ranks are busy for 6 of (2 + 1) * 3 = 9. Two places of 3/4 take 4/3 as long."""
    schedule = build("gpipe", 2, 2)
    assert span_on_cores(schedule, stage_costs(schedule, Costs(F=1.0, B=2.0)), at_once) == pytest.approx(span)


def test_messages_take_time_and_no_core() -> None:
    """On one core: F and F, a message, F and B on the other rank, whose gradient travels while it works on the next."""
    schedule = build("gpipe", 2, 1)
    costs = stage_costs(schedule, Costs(F=1.0, B=2.0, comm=0.5))
    assert span_on_cores(schedule, costs, 1) == pytest.approx(1.0 + 0.5 + 1.0 + 2.0 + 0.5 + 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_every_schedule(name: str) -> None:
    """Greedy lists are never longer than the work shared out, and the longest chain, one after the other (Graham)."""
    schedule = build(name, 4, 8)
    costs = stage_costs(schedule, COSTS)
    alone = simulate(schedule, costs)
    work = sum(alone.computing)
    assert span_on_cores(schedule, costs, 4) == pytest.approx(alone.makespan)
    assert span_on_cores(schedule, costs, 1) == pytest.approx(work)
    for at_once in (1.5, 2, 3):
        span = span_on_cores(schedule, costs, at_once)
        assert max(alone.makespan, work / at_once) <= span * (1 + 1e-9)
        assert span <= work / at_once + alone.makespan * 4 / at_once
