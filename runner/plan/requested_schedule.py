"""The schedule that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.config.compose.resolve import resolve
from runner.config.links import with_measured_link
from runner.config.optimizers import OPTIMIZERS
from runner.config.schema import CostConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Op, Schedule

__all__ = [
    "costs_of",
    "curvature_problems",
    "executed_schedule",
    "filling_problems",
    "follows_profile",
    "is_chosen_by_plan",
    "move_problems",
    "num_stages",
    "post_validation_problems",
    "resolve_request",
    "schedule_of",
    "schedule_problems",
    "statistics_problems",
    "twin_problems",
]


def resolve_request(overrides: Sequence[str]) -> RunConfig:
    """The configuration that ``overrides`` ask for.

    Raises:
        RequestError: as :func:`runner.config.compose.resolve.resolve` does, which knows the option files alone: of a
            published schedule it is said here that this version does not have it.
    """
    try:
        return with_measured_link(resolve(overrides))
    except RequestError as error:
        raise RequestError([_of_published(problem) for problem in error.problems]) from error


def _of_published(problem: Problem) -> Problem:
    name = problem.value
    if problem.path == "schedule" and isinstance(name, str) and name in registry.NOT_AVAILABLE:
        return registry.not_available(name)
    return problem


def costs_of(config: RunConfig) -> Costs:
    """The durations of ``cost.*``."""
    cost = config.cost
    return Costs(
        F=cost.F, B=cost.B, I=cost.I, W=cost.W, comm=cost.comm, curvature=cost.curvature, inversion=cost.inversion
    )


def schedule_problems(config: RunConfig) -> list[Problem]:
    """What stands against the schedule that ``config`` asks for."""
    return registry.request_problems(config.schedule.name, _asked(config))


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule that ``config`` asks for; an order that follows from costs, from ``cost.*``.

    Raises:
        RequestError: with everything that :func:`schedule_problems` finds.
    """
    return registry.generate(config.schedule.name, _asked(config))


def post_validation_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """Schedules whose steps cannot be taken back."""
    if not config.schedule.post_validation:
        return
    why = None
    if len(schedule.rows) > 1:
        why = f"The ranks of {schedule.name} hold stages twice, and both copies would have to be taken back together"
    elif schedule.ahead:
        why = "What a rank has begun of the next step when one is taken back must be known before"
    elif schedule.moves:
        why = f"{schedule.name} sends what autograd saved in a forward to another rank, and could not take that back"
    if why is not None:
        yield Problem("schedule.post_validation", True, "must be false", why, "schedule.post_validation=false")


def twin_problems(schedule: Schedule, statistics: Sequence[str]) -> list[Problem]:
    """What does not go with stages that are on several ranks of one pipeline.

    Args:
        schedule: any.
        statistics: names of the layers with running statistics.
    """
    return statistics_problems(schedule.name, statistics) if len(schedule.rows) > 1 else []


def move_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """What does not go with activations that other ranks keep for a while."""
    if not schedule.moves:
        return
    why = f"{schedule.name} sends what autograd saved in a forward to another rank"
    asked: tuple[tuple[str, object, object, str], ...] = (
        ("activation_checkpoint", config.activation_checkpoint.name, "none", "which these policies make anew"),
        ("offload.activations", config.offload.activations, "none", "which is then in the host's memory"),
        ("compile", config.compile, False, "of layers that run as they are written"),
        ("zero.stage", config.zero.stage, None, "and DeepSpeed runs the forward itself"),
    )
    for path, value, needed, because in asked:
        if value != needed:
            shown = "null" if needed is None else str(needed).lower()
            yield Problem(path, value, f"must be {shown}", f"{why}, {because}", f"{path}={shown}")


def statistics_problems(schedule: str, names: Sequence[str]) -> list[Problem]:
    """What stands against layers with running statistics whose stages are on several ranks of one pipeline."""
    if not names:
        return []
    rule = f"must be a schedule of one pipeline with running statistics ({names[0]})"
    why = "The copies of a stage would each see the micro-batches of one direction, and remember other averages"
    return [Problem("schedule.name", schedule, rule, why, "schedule=1f1b")]


def curvature_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """Schedules under which an optimizer cannot take the factors of its layers' curvature."""
    if config.optimizer.name not in OPTIMIZERS or not OPTIMIZERS[config.optimizer.name].curvature:
        return
    why = None
    if len(schedule.rows) > 1:
        why = f"The ranks of {schedule.name} hold stages twice, and each copy sees a part of the micro-batches"
    elif schedule.moves:
        why = f"{schedule.name} sends what autograd saved to another rank, and the layers' inputs would stay"
    elif any(action.op is Op.I for actions in schedule.actions for action in actions):
        why = f"{schedule.name} splits the backward, and its factors are taken in a whole one"
    if why is not None:
        rule = f"must be another with optimizer={config.optimizer.name}"
        yield Problem("schedule.name", schedule.name, rule, why, "schedule=1f1b")


def filling_problems(config: RunConfig, schedule: Schedule) -> Iterator[Problem]:
    """What a schedule asks of the optimizer whose work fills its bubbles."""
    if not schedule.has_curvature:
        return
    optimizer, needed = config.optimizer, f"with schedule={schedule.name}"
    if optimizer.name != "kfac":
        why = f"The bubbles of {schedule.name} are filled with the sums and inversions of K-FAC"
        yield Problem("optimizer.name", optimizer.name, f"must be kfac {needed}", why, "optimizer=kfac")
    elif optimizer.refresh_every is not None:
        why = f"The inverses are new when the bubbles of {schedule.name} have had room for them"
        path = "optimizer.refresh_every"
        yield Problem(path, optimizer.refresh_every, f"must be null {needed}", why, f"{path}=null")


def is_chosen_by_plan(config: RunConfig) -> bool:
    """Whether the request leaves the choice of the schedule to the plan."""
    spec = _spec(config)
    return spec is not None and spec.by_plan


def follows_profile(config: RunConfig) -> bool:
    """Whether the order that is run follows from the profile's seconds: ``cost.*``, where set, wins over them."""
    spec = _spec(config)
    return spec is not None and spec.by_costs and config.cost == CostConfig()


def num_stages(config: RunConfig) -> int:
    """Stages of a request's schedule; of a request without a schedule, its ranks."""
    asked, spec = config.schedule, _spec(config)
    return config.parallelism.pipeline * (asked.chunks or (spec.default_chunks if spec is not None else None) or 1)


def _spec(config: RunConfig) -> registry.ScheduleSpec | None:
    name = config.schedule.name
    return registry.SPECS.get(registry.ALIASES.get(name, name))


def executed_schedule(config: RunConfig, costs: StageCosts | None = None) -> Schedule:
    """What is planned and run for :func:`schedule_of`: full backwards where nothing is gained by their two parts.

    Args:
        costs: in place of ``cost.*``.

    Raises:
        RequestError: as :func:`schedule_of` does.
    """
    return fuse_backwards(registry.generate(config.schedule.name, _asked(config, costs)))


def _asked(config: RunConfig, costs: StageCosts | None = None) -> registry.ScheduleRequest:
    asked = config.schedule
    return registry.ScheduleRequest(
        ranks=config.parallelism.pipeline,
        microbatches=asked.microbatches,
        chunks=asked.chunks,
        file=asked.file,
        memory_limit=asked.memory_limit,
        costs=costs_of(config) if costs is None else costs,
        variant=asked.variant,
        pipes=asked.pipes,
        opportunistic=asked.opportunistic or None,
        base=asked.base,
    )
