"""Makes the schedule that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from runner.config.compose.resolve import resolve
from runner.config.links import with_measured_link
from runner.config.schema import CostConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.plan.layout.batches import largest_sizes
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Schedule

__all__ = [
    "costs_of",
    "executed_schedule",
    "follows_profile",
    "is_chosen_by_plan",
    "num_stages",
    "resolve_request",
    "schedule_of",
    "schedule_problems",
]


def resolve_request(overrides: Sequence[str]) -> RunConfig:
    """Make the configuration that ``overrides`` ask for.

    Raises:
        RequestError: see :func:`runner.config.compose.resolve.resolve`.
    """
    return with_measured_link(resolve(overrides))


def costs_of(config: RunConfig) -> Costs:
    """The durations in ``cost.*``; keys that do not belong to every schedule are for work that fills bubbles.

    The two parts of a backward take half of ``cost.B`` each, unless they are given.
    """
    given = {field.name: getattr(config.cost, field.name) for field in fields(config.cost)}
    given |= {part: config.cost.B / 2 for part in ("I", "W") if given[part] is None}
    plain = {field.name: given.pop(field.name) for field in fields(Costs) if field.name in given}
    return Costs(**plain, fills=given)


def schedule_problems(config: RunConfig) -> list[Problem]:
    """Problems of the schedule that ``config`` asks for."""
    problems = registry.request_problems(config.schedule.name, _asked(config))
    if (config.schedule.steps or 1) > 1 and not (config.schedule.post_validation or _is_asynchronous(config)):
        rule = "needs schedule.post_validation=true, or an asynchronous schedule"
        why = "Otherwise all ranks wait for each other before the optimizer step: every step looks like the first"
        fix = "schedule.post_validation=true"
        problems.append(Problem("schedule.steps", config.schedule.steps, rule, why, fix))
    return problems


def _is_asynchronous(config: RunConfig) -> bool:
    spec = _spec(config)
    return spec is not None and spec.kind == "asynchronous" and not spec.averaged_pipes


def schedule_of(config: RunConfig) -> Schedule:
    """Make the schedule that ``config`` asks for; an order that depends on costs uses ``cost.*``.

    Raises:
        RequestError: the request has problems; the error contains all that :func:`schedule_problems` finds.
    """
    return registry.generate(config.schedule.name, _asked(config))


def is_chosen_by_plan(config: RunConfig) -> bool:
    """Whether the request leaves the choice of the schedule to the plan."""
    spec = _spec(config)
    return spec is not None and spec.by_plan


def follows_profile(config: RunConfig) -> bool:
    """Whether the order that runs depends on the profile's seconds; ``cost.*``, if set, is used instead of them."""
    spec = _spec(config)
    return spec is not None and spec.by_costs and config.cost == CostConfig()


def num_stages(config: RunConfig) -> int:
    """The number of stages of a request's schedule; for an unknown schedule, one per rank by default."""
    asked, spec = config.schedule, _spec(config)
    if (replicas := asked.option("replicas")) is not None:
        return len(replicas)
    if (placement := asked.option("placement")) is not None:
        return len(placement)
    return config.parallelism.pipeline * (asked.chunks or (spec.default_chunks if spec is not None else None) or 1)


def _spec(config: RunConfig) -> registry.ScheduleSpec | None:
    """The schedule's entry; None where there is none, or where it cannot be had."""
    try:
        return registry.find_spec(config.schedule.name, config.schedule.target)
    except RequestError:
        return None


def executed_schedule(config: RunConfig, costs: StageCosts | None = None) -> Schedule:
    """The schedule that is planned and run: :func:`schedule_of` with full backwards where splitting gains nothing.

    Args:
        costs: durations to use instead of ``cost.*``.

    Raises:
        RequestError: see :func:`schedule_of`.
    """
    schedule = fuse_backwards(registry.generate(config.schedule.name, _asked(config, costs)))
    shares = config.schedule.option("shares")
    if shares is None:
        return schedule
    sizes = largest_sizes(config.data.batch_size, config.parallelism.data, shares)
    return replace(schedule, sizes=tuple(map(float, sizes)))


def _asked(config: RunConfig, costs: StageCosts | None = None) -> registry.ScheduleRequest:
    asked = config.schedule
    return registry.ScheduleRequest(
        config.parallelism.pipeline,
        asked.microbatches,
        asked.chunks,
        costs_of(config) if costs is None else costs,
        asked.given,
        asked.target,
        asked.kwargs,
    )
