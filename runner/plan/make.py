"""From a request and a profile to a frozen plan: nothing here starts a process or allocates a tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import Problem, raise_problems
from runner.plan import zero_rules as zero
from runner.plan.activations import (
    activation_notes,
    activation_problems,
    plan_activations,
    split_backward_problems,
)
from runner.plan.cut.partition import NothingFitsError, Partition, partition, partition_problems
from runner.plan.layout import batches
from runner.plan.layout.topology import Topology
from runner.plan.memory.limits import host_memory_bytes, memory_limit_bytes, on_accelerator
from runner.plan.memory.predict import StageMemoryLimit, in_flight_microbatches, optimizer_temporaries, predict_memory
from runner.plan.memory.reserved import predict_reserved
from runner.plan.memory.zero import flattened_bytes, sharing_of
from runner.plan.requested_schedule import (
    curvature_problems,
    executed_schedule,
    filling_problems,
    follows_profile,
    is_chosen_by_plan,
    move_problems,
    post_validation_problems,
    schedule_problems,
    twin_problems,
)
from runner.plan.search.advice import compare_without_pipeline, misfit
from runner.plan.search.choose import choose
from runner.plan.stages.figures import StageFigures, stage_figures
from runner.plan.stages.scale import for_samples
from runner.plan.time.predict import predict_time, stage_costs
from runner.plan.time.zero import with_sharing
from runner.plan.values import Link, RunPlan, StageSeconds
from runner.profile import ModelProfile
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule

__all__ = ["make_plan", "plan_problems"]


@dataclass(frozen=True)
class _Machine:
    """What is known of the machine besides the request."""

    link: Link | None
    local_ranks: int | None
    device_memory_bytes: int | None


def plan_problems(
    config: RunConfig,
    num_layers: int,
    *,
    world_size: int | None = None,
    layer_names: Sequence[str] = (),
    statistics: Sequence[str] = (),
) -> list[Problem]:
    """The rules that need a schedule or a topology. Those that need the sections alone are the configuration's.

    Args:
        config: the request.
        num_layers: layers of the model.
        world_size: ranks that were started already (torchrun, srun); None where the runner starts them.
        layer_names: their names; without them, names in the request are not looked up.
        statistics: names of those with running statistics.
    """
    problems = schedule_problems(config)
    if not problems and not is_chosen_by_plan(config):
        problems += _conflicts(config, executed_schedule(config), num_layers, statistics)
    if layer_names:
        problems += activation_problems(config, layer_names)
    wanted = _layout(config)["world_size"]
    if world_size is not None and world_size != wanted:
        rule = f"pipeline x data x tensor makes {wanted} ranks, {world_size} were started"
        problems.append(
            Problem("parallelism", config.parallelism.name, rule, fix=f"{wanted} processes, or other degrees")
        )
    return problems


def _conflicts(config: RunConfig, schedule: Schedule, num_layers: int, statistics: Sequence[str]) -> list[Problem]:
    """What of the request does not go with a schedule."""
    given = config.partition
    problems = partition_problems(given.name, given.boundaries, schedule.stages, num_layers)
    problems += split_backward_problems(config, schedule)
    problems += [*zero.schedule_problems(config, schedule), *move_problems(config, schedule)]
    problems += [*curvature_problems(config, schedule), *filling_problems(config, schedule)]
    return [*problems, *twin_problems(schedule, statistics), *post_validation_problems(config, schedule)]


def make_plan(
    config: RunConfig,
    profile: ModelProfile,
    *,
    schedule: Schedule | None = None,
    stage_seconds: StageSeconds | None = None,
    link: Link | None = None,
    local_ranks: int | None = None,
    device_memory_bytes: int | None = None,
    profile_of: Callable[[RunConfig], ModelProfile] | None = None,
) -> RunPlan:
    """Check, partition and predict.

    Args:
        config: the request.
        profile: its model's, for any micro-batch size; read for the step's largest micro-batch.
        schedule: what a plan of this request chose before, where the choice is the plan's.
        stage_seconds: this plan's stages measured in place; they win over the profile's layers.
        link: measured; default: what ``config.hardware`` states.
        local_ranks: ranks that share this machine's memory; default: all.
        device_memory_bytes: of this machine's accelerator, where the run uses one.
        profile_of: makes the profile of a changed request; with it, advice may try other precisions.

    Returns:
        the plan; where it does not fit, ``fits`` is false and ``problems`` says why and what would help.

    Raises:
        RequestError: with everything that :func:`plan_problems` finds.
    """
    with _collector_paused():
        machine = _Machine(link, local_ranks, device_memory_bytes)
        return _make(config, profile, machine, schedule, stage_seconds, profile_of)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Large plans are millions of small tuples, none of them garbage: looking through them doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make(
    config: RunConfig,
    profile: ModelProfile,
    machine: _Machine,
    chosen: Schedule | None,
    stage_seconds: StageSeconds | None,
    profile_of: Callable[[RunConfig], ModelProfile] | None,
) -> RunPlan:
    _refuse(config, profile)
    plan = _planned(config, profile, machine, chosen, stage_seconds)

    def replan(changed: RunConfig) -> RunPlan:
        _refuse(changed, profile)
        fresh = profile_of is not None and changed.precision.name != config.precision.name
        return _planned(changed, profile_of(changed) if fresh and profile_of else profile, machine)

    problems = () if plan.fits else (misfit(plan, config, replan, other_precisions=profile_of is not None),)
    by_layers = plan.time if stage_seconds is None else _planned(config, profile, machine, chosen).time
    advice = (*plan.advice, *compare_without_pipeline(by_layers, config, replan))
    return replace(plan, problems=problems, advice=advice)


def _refuse(config: RunConfig, profile: ModelProfile) -> None:
    names = [layer.name for layer in profile.layers]
    raise_problems(plan_problems(config, len(names), layer_names=names, statistics=_statistics(profile)))


def _statistics(profile: ModelProfile) -> list[str]:
    return [layer.name for layer in profile.layers if layer.has_running_statistics]


def _planned(
    config: RunConfig,
    profile: ModelProfile,
    machine: _Machine,
    chosen: Schedule | None = None,
    stage_seconds: StageSeconds | None = None,
) -> RunPlan:
    """The plan of a request without problems, with its schedule chosen where that is left to the plan."""
    if chosen is None and not is_chosen_by_plan(config):
        return _assemble(config, profile, machine, executed_schedule(config), stage_seconds)
    if chosen is not None:
        return _assemble(config, profile, machine, chosen, stage_seconds)

    def assemble(schedule: Schedule) -> RunPlan:
        raise_problems(_conflicts(config, schedule, len(profile.layers), _statistics(profile)))
        return _assemble(config, profile, machine, schedule, stage_seconds)

    return choose(config, assemble)


def _assemble(
    config: RunConfig,
    profile: ModelProfile,
    machine: _Machine,
    schedule: Schedule,
    stage_seconds: StageSeconds | None,
) -> RunPlan:
    """The plan for a schedule, without advice. One replica is planned; the others are alike."""
    layout = _layout(config)
    batch, data, microbatches = config.data.batch_size, layout["data"], config.schedule.computed_microbatches
    profile = for_samples(profile, batches.largest_microbatch(batch, data, microbatches))
    accelerated = on_accelerator(config, machine.device_memory_bytes)
    limit = memory_limit_bytes(
        config, local_ranks=machine.local_ranks or layout["world_size"], device_bytes=machine.device_memory_bytes
    )
    needs = _memory_needs(config, profile, schedule, accelerated=accelerated)
    layers, notes = _cut(config, profile, schedule, limit, needs)
    activations, costs = plan_activations(config, profile, layers, on_accelerator=accelerated)
    figures = stage_figures(costs, layers)
    work: dict[str, Any] = {
        "mean_samples": batches.mean_microbatch(batch, data, microbatches),
        "data": data,
        "link": _link(config, machine),
    }
    schedule = _ordered_by_profile(config, profile, figures, schedule, **work)
    in_flight = in_flight_microbatches(schedule)
    notes += activation_notes(config, profile, activations, in_flight, on_accelerator=accelerated)
    notes += _move_notes(schedule, figures)
    if work["link"].bytes_per_second is None and stage_seconds is None and layout["world_size"] > 1:
        notes += ("the link's speed is not known, messages count as free: set hardware.link_bytes_per_second",)
    program, validated_late = lower(schedule), config.schedule.post_validation
    copied_by = data if config.checkpoint.asynchronous else None
    return RunPlan(
        layout=layout,
        topology=Topology.grid(layout["pipeline"], data, layout["tensor"], placement=schedule.rows),
        schedule=schedule,
        program=program,
        partition=layers,
        profile=profile,
        figures=figures,
        in_flight=in_flight,
        activations=activations,
        memory=replace(
            predict_memory(program, profile, figures, **needs, backup=validated_late, copied_by=copied_by),
            reserved=predict_reserved(config, profile.trace, temporaries=needs["temporaries"]),
        ),
        time=predict_time(
            schedule,
            profile,
            figures,
            **work,
            stage_seconds=stage_seconds,
            adjusted=lambda costs: with_sharing(config, costs, profile, figures, work["link"]),
            post_validation=validated_late,
        ),
        memory_limit_bytes=limit,
        host_limit_bytes=host_memory_bytes(config, local_ranks=machine.local_ranks or layout["world_size"]),
        advice=notes,
    )


def _move_notes(schedule: Schedule, figures: Sequence[StageFigures]) -> tuple[str, ...]:
    """The traffic of activations that other ranks keep for a while."""
    if not schedule.moves:
        return ()
    moved = sum(figures[move.stage].saved_bytes + figures[move.stage].input_bytes for move in schedule.moves)
    return (
        f"{schedule.name} sends {format_bytes(2 * moved)} of activations a step between ranks r and D-1-r, of "
        f"{len(schedule.moves)} micro-batches there and back; the step's seconds do not know of these messages",
    )


def _memory_needs(config: RunConfig, profile: ModelProfile, schedule: Schedule, *, accelerated: bool) -> dict[str, Any]:
    """What a rank's memory depends on besides its layers: arguments of :func:`predict_memory`."""
    data = config.parallelism.data
    temporaries = optimizer_temporaries(config.optimizer.name)
    by_itself = zero.shares_by_itself(config, schedule)
    return {
        "batch_samples": batches.split_sizes(config.data.batch_size, data)[0],
        "temporaries": temporaries,
        "sharing": None if by_itself else sharing_of(config, profile, temporaries),
        "states_over": data if by_itself else 1,
        "flattened": flattened_bytes(config),
        "accelerated": accelerated,
    }


def _link(config: RunConfig, machine: _Machine) -> Link:
    """Between ranks: as measured or stated, slowed down where that is asked for."""
    link = machine.link or Link(config.hardware.link_latency_seconds, config.hardware.link_bytes_per_second)
    return link.slowed(config.transport.delay_seconds, config.transport.bytes_per_second)


def _ordered_by_profile(
    config: RunConfig,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    schedule: Schedule,
    *,
    mean_samples: float,
    data: int,
    link: Link,
) -> Schedule:
    """The schedule, with its order found anew where that follows the stages' seconds."""
    if not follows_profile(config):
        return schedule
    copies = [data] * len(figures)
    return executed_schedule(config, stage_costs(profile, figures, mean_samples=mean_samples, copies=copies, link=link))


def _cut(
    config: RunConfig, profile: ModelProfile, schedule: Schedule, limit: int, needs: dict[str, Any]
) -> tuple[Partition, tuple[str, ...]]:
    """The stages' layers, and what is to be said of them.

    The search sees the layers as they would be in one stage; what counts is planned for the stages found.
    """
    whole = (0, len(profile.layers) - 1)
    _, rough = plan_activations(config, profile, [whole], on_accelerator=needs["accelerated"])
    return _partition(config, rough, schedule, StageMemoryLimit.of(rough, schedule, limit, **needs))


def _partition(
    config: RunConfig, profile: ModelProfile, schedule: Schedule, limit: StageMemoryLimit
) -> tuple[Partition, tuple[str, ...]]:
    """The stages' layers. Where no partition fits, the plan shows the one balanced by time, and says so."""
    name, boundaries = config.partition.name, config.partition.boundaries
    stages, placement = schedule.stages, schedule.placement[0]
    try:
        return partition(name, profile, stages, boundaries=boundaries, limit=limit, placement=placement), ()
    except NothingFitsError as error:
        layers = partition(name, profile, stages, placement=placement)
        return layers, (f"{error.problems[0].rule}; shown is the one balanced by time alone",)


def _layout(config: RunConfig) -> dict[str, int]:
    degrees = config.parallelism
    world_size = degrees.pipeline * degrees.data * degrees.tensor
    return {
        "pipeline": degrees.pipeline,
        "data": degrees.data,
        "tensor": degrees.tensor,
        "world_size": world_size,
    }
