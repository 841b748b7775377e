"""The schedule that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.schedule import registry
from runner.schedule.simulate import Costs
from runner.schedule.values import Schedule

__all__ = ["costs_of", "schedule_of", "schedule_problems", "twin_problems"]


class _Asked(TypedDict):
    ranks: int
    microbatches: int
    chunks: int | None
    file: str | None
    memory_limit: int | None
    costs: Costs
    variant: str | None
    pipes: int | None


def costs_of(config: RunConfig) -> Costs:
    """The durations of ``cost.*``."""
    cost = config.cost
    return Costs(F=cost.F, B=cost.B, I=cost.I, W=cost.W, comm=cost.comm)


def schedule_problems(config: RunConfig) -> list[Problem]:
    """What stands against the schedule that ``config`` asks for."""
    return registry.problems_of(config.schedule.name, **_asked(config))


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule that ``config`` asks for.

    Raises:
        RequestError: with everything that :func:`schedule_problems` finds.
    """
    return registry.build(config.schedule.name, **_asked(config))


def twin_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """What does not go with a schedule of several pipelines, whose stages are on several ranks each."""
    if len(schedule.placement) > 1 and config.schedule.post_validation:
        why = f"The ranks of {schedule.name} hold stages twice, and both copies would have to be taken back together"
        fix = "schedule.post_validation=false"
        yield Problem("schedule.post_validation", True, "must be false", why, fix)


def _asked(config: RunConfig) -> _Asked:
    asked = config.schedule
    return {
        "ranks": config.parallelism.pipeline,
        "microbatches": asked.microbatches,
        "chunks": asked.chunks,
        "file": asked.file,
        "memory_limit": asked.memory_limit,
        "costs": costs_of(config),
        "variant": asked.variant,
        "pipes": asked.pipes,
    }
