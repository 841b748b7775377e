"""Pipeline schedules as values: they are generated, checked, lowered, simulated and drawn here, without torch."""

from __future__ import annotations

from runner.schedule.catalogue.registry import ALIASES, NAMES, SPECS, ScheduleSpec, build, problems_of
from runner.schedule.checking.program import check_program
from runner.schedule.checking.schedule import check
from runner.schedule.dependencies import dependencies
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Costs, Simulation, StageCosts, simulate
from runner.schedule.values import Action, Op, Payload, Program, Schedule, parse_action

__all__ = [
    "ALIASES",
    "Action",
    "Costs",
    "NAMES",
    "Op",
    "Payload",
    "Program",
    "SPECS",
    "Schedule",
    "ScheduleSpec",
    "Simulation",
    "StageCosts",
    "build",
    "check",
    "check_program",
    "dependencies",
    "forward_only",
    "lower",
    "parse_action",
    "problems_of",
    "simulate",
]
