"""Advice for a plan. Each proposal is tried by planning it, so that only advice that helps is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.config.units import format_bytes, format_seconds
from runner.errors import Problem
from runner.plan.activations import searches, searches_programs
from runner.plan.search.trials import (
    BUDGET,
    Overrides,
    Replan,
    cost_of_trial,
    doubled,
    nodes_for,
    of_equals,
    of_one_size,
    policy,
    spelled,
    tried,
)
from runner.plan.values import RunPlan, TimePrediction
from runner.schedule.catalogue import registry

__all__ = ["Comparison", "compare_without_pipeline", "misfit"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pipeline compared with the same devices without one.

    Args:
        line: the numbers, for a reader of the plan.
        seconds: the shortest step without a pipeline; None if nothing without one fits.
        pays: whether the pipeline is the faster one; None if that cannot be told.
        lacks: what layouts without a pipeline that do not fit would need.
    """

    line: str
    seconds: float | None
    pays: bool | None
    lacks: tuple[str, ...] = ()


def misfit(plan: RunPlan, config: RunConfig, replan: Replan, *, other_precisions: bool = False) -> Problem:
    """The reason why a plan does not fit: the rank, its largest part, and all overrides found that make it fit.

    Args:
        plan: a plan that does not fit.
        config: its request.
        replan: plans a changed request; raises RequestError if there is no such plan.
        other_precisions: whether ``replan`` knows the sizes for other precisions.
    """
    if not plan.fits_host:
        return _host_misfit(plan)
    peaks, rank = plan.peak_memory_bytes, plan.fullest
    parts = plan.rank_parts[rank]
    largest = parts.largest()
    stages = ", ".join(map(str, plan.topology.stages_of(rank)))
    rule = f"rank {rank} (stage {stages}) needs {format_bytes(peaks[rank])}"
    why = f"the largest part is {largest}, {format_bytes(getattr(parts, largest))}"
    found = [spelled(overrides) for overrides in _remedies(plan, config, replan, other_precisions)]
    if not found:
        why += (
            "; no other schedule, micro-batch count, partition, activation checkpoint, pipeline degree or batch tried "
            "makes it fit"
        )
    return Problem("memory_limit", format_bytes(plan.limit_of(rank)), rule, why, " or ".join(found))


def _host_misfit(plan: RunPlan) -> Problem:
    """The problem that offloaded values do not fit into the host's memory."""
    offloaded, limit = plan.host_memory_bytes, plan.host_limit_bytes
    assert limit is not None
    rank = offloaded.index(max(offloaded))
    rule = f"rank {rank} offloads {format_bytes(offloaded[rank])}"
    why = f"Its part of the host's memory is {format_bytes(limit)}"
    return Problem("hardware.host_memory_bytes", format_bytes(limit), rule, why, "more replicas or offload=nvme")


def compare_without_pipeline(
    own: TimePrediction, config: RunConfig, replan: Replan, *, least_gain: float
) -> Comparison | None:
    """Compare with the same devices without a pipeline, and with one device; None if there is no pipeline.

    None, too, for unlike devices, which would need unlike parts of a batch, and for a strategy that would search for
    minutes among the programs of a whole model in one stage.

    Args:
        own: the plan's time, from the same layer profile that ``replan`` uses, so that times can be compared.
        config: its request.
        replan: see :func:`misfit`.
        least_gain: the share of a step by which one must be shorter, so that the two are told apart.
    """
    degrees = config.parallelism
    if degrees.pipeline == 1 or searches(config) or config.hardware.devices:
        return None
    devices = degrees.pipeline * degrees.data
    others = [_without_pipeline(config, replan, count) for count in sorted({devices, 1}, reverse=True)]
    quickest = min(
        (other for other in others if other.seconds is not None), key=lambda o: o.seconds or 0.0, default=None
    )
    told = "; ".join(other.told for other in others)
    numbers = f"{format_seconds(own.step_seconds)} a step with a bubble of {own.bubble_ratio:.0%}; {told}"
    seconds = quickest.seconds if quickest is not None else None
    lacks = tuple(other.lack for other in others if other.lack)
    if quickest is not None and seconds is not None:
        if seconds < own.step_seconds * (1 - least_gain):
            line = f"pipelining does not pay here: {numbers}. Try {quickest.overrides}."
            return Comparison(line, seconds, False, lacks)
        if own.step_seconds > seconds * (1 - least_gain):
            line = f"a step may be as long without a pipeline, by {quickest.overrides}: {numbers}."
            return Comparison(line, seconds, None, lacks)
    return Comparison(f"pipelining pays here: {numbers}.", seconds, True, lacks)


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A layout without a pipeline.

    Args:
        told: its name and its seconds, or the reason why it cannot be taken.
        overrides: the words of a command line that ask for it.
        seconds: seconds of a step; None if it cannot be taken.
        lack: if it does not fit, what it needs.
    """

    told: str
    overrides: str = ""
    seconds: float | None = None
    lack: str = ""


def _without_pipeline(config: RunConfig, replan: Replan, devices: int) -> _Alternative:
    """Data parallelism over the devices with the fewest micro-batches with which it fits."""
    name = f"data parallelism over {devices} devices" if devices > 1 else "one device"
    if devices > config.data.batch_size:
        return _Alternative(f"{name} would have more replicas than samples")
    peaks = []
    for microbatches in doubled(1, -(-config.data.batch_size // devices)):
        overrides: dict[str, str | int | None] = {
            "parallelism.pipeline": 1,
            "parallelism.data": devices,
            "schedule.microbatches": microbatches,
            **nodes_for(config, devices * config.parallelism.tensor),
        }
        if not _spec(config).one_rank:
            overrides |= {"schedule": "1f1b"}
        if config.partition.name == "manual" or config.partition.migrate is not None:
            overrides |= {"partition": "auto", "partition.migrate": None}
        overrides |= of_equals(config)
        plan = tried(config, overrides, replan)
        if plan is not None and plan.fits:
            seconds = plan.time.step_seconds
            return _Alternative(f"{name} {format_seconds(seconds)}", spelled(overrides), seconds)
        if plan is not None:
            peaks.append((max(plan.memory.peak_bytes), plan.memory_limit_bytes))
    if not peaks:
        return _Alternative(f"{name} cannot run this request")
    peak, limit = min(peaks)
    return _Alternative(f"{name} does not fit", lack=f"{name} needs {format_bytes(peak)} of {format_bytes(limit)}")


def _spec(config: RunConfig) -> registry.ScheduleSpec:
    found = registry.find_spec(config.schedule.name, config.schedule.target)
    assert found is not None  # the request has a plan
    return found


def _remedies(plan: RunPlan, config: RunConfig, replan: Replan, other_precisions: bool) -> Iterator[Overrides]:
    """The smallest change of each kind that fits; with 1f1b if the schedule keeps more and 1f1b alone does not fit.

    Where the activation policy would search for minutes, for each change anew, it is rotor, or changes of it.
    """
    budget = BUDGET
    base: dict[str, str | int | None] = {}
    if searches_programs(config):
        base = dict(policy(config, "rotor"))
        found = tried(config, base, replan)
        if found is not None and found.fits:
            yield base
            return
    for kind in _kinds(config, len(plan.profile.layers), other_precisions):
        for change in kind:
            overrides = {**base, **change}
            cost = cost_of_trial(config, overrides, plan)
            if cost > budget:
                break
            budget -= cost
            found = tried(config, overrides, replan)
            if found is not None and found.fits:
                yield overrides
                break
        else:
            if kind and kind[-1].get("schedule") == "1f1b":
                base |= {"schedule": "1f1b"}


def _kinds(config: RunConfig, num_layers: int, other_precisions: bool) -> list[list[Overrides]]:
    """Changes to try: the least intrusive kind first, and the smallest change of a kind first."""
    schedule, degrees = config.schedule, config.parallelism
    kinds: list[list[Overrides]] = []
    if schedule.name not in ("1f1b", "dapple", "naive") and degrees.pipeline > 1:
        kinds.append([{"schedule": "1f1b"}])
    share = -(-config.data.batch_size // degrees.data)
    if schedule.name != "from_file":
        more = [n for n in doubled(schedule.microbatches, share) if n > schedule.microbatches]
        kinds.append([{"schedule.microbatches": n, **of_one_size(config)} for n in more])
    if config.partition.name != "auto" and degrees.pipeline > 1:
        kinds.append([{"partition": "auto"}])
    kinds.append(_sharing(config))
    if config.activation_checkpoint.name == "none":
        kinds.append([{"activation_checkpoint": "full"}])
    if other_precisions and config.precision.name == "fp32":
        kinds.append([{"precision": "bf16"}])
    if schedule.name != "from_file" and config.partition.name != "manual":
        deeper = [n for n in doubled(degrees.pipeline, num_layers) if n > degrees.pipeline]
        others = degrees.data * degrees.tensor
        kinds.append([{"parallelism.pipeline": n, **nodes_for(config, n * others)} for n in deeper])
    halves = (config.data.batch_size >> k for k in range(1, config.data.batch_size.bit_length()))
    kinds.append([{"data.batch_size": n} for n in halves if n >= degrees.data * schedule.microbatches])
    return kinds


def _sharing(config: RunConfig) -> list[Overrides]:
    """Changes to ZeRO, and to states in the host's memory."""
    if config.offload.optimizer != "none" or config.schedule.name == "from_file":
        return []
    stage = config.zero.stage or 0
    stages = [number for number in (1, 2) if number > stage] if config.parallelism.data > 1 else []
    more: list[Overrides] = [{"zero.stage": number} for number in stages]
    return [*more, {"zero.stage": max(stage, 2), "offload.optimizer": "cpu"}]
