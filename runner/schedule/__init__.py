"""Pipeline schedules as values: generate, check, lower, simulate, draw. Imports no torch."""

from __future__ import annotations

from runner.schedule.check import check
from runner.schedule.check_program import check_program
from runner.schedule.dependencies import dependencies
from runner.schedule.generators.forward_only import forward_only
from runner.schedule.lower import lower
from runner.schedule.registry import ALIASES, NAMES, SPECS, ScheduleSpec, build, problems_of
from runner.schedule.simulate import Costs, Simulation, StageCosts, simulate
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
