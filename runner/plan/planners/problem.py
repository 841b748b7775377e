"""Makes a planning problem from a request and profiles of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from runner.config.links import ranks_of_node
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.plan.activations import reads_budget
from runner.plan.cores import shared_cores
from runner.plan.devices import devices_of, limits_of
from runner.plan.draft.draft import Draft, Machine, draft_of
from runner.plan.memory.limits import memory_limit_bytes, on_accelerator, ranks_of_a_node
from runner.plan.planners.joint import divisors
from runner.plan.planners.values import Device, Division, HostUpdate, Order, PlanningProblem
from runner.plan.planners.ways import lines, merged, moved_ways, ways_to_keep
from runner.plan.requested_schedule import executed_schedule
from runner.plan.stages.figures import layer_state_bytes
from runner.plan.stages.scale import between, for_samples
from runner.plan.time.zero import host_update_seconds_per_byte
from runner.profile import ModelProfile
from runner.schedule.catalogue.registry import ALIASES, SEARCHED, SPECS

__all__ = ["ProfiledSizes", "alone", "expected_profiles", "interpolated", "planning_problem"]

ProfiledSizes: TypeAlias = Mapping[int, Sequence[ModelProfile]]
"""Profiles of one or two micro-batch sizes, by the number of ranks that divide layers."""

# Orders to which another one is equal or better in time and memory by their closed forms; they must be named.
_NEVER_BEST = ("naive", "gpipe", "looped_bfs", "gems", "varuna", "bpipe")
_ENGINE = 1e-3  # seconds of a CPU for each action of a rank: rehearsals of small models take 1 to 5 ms more
_FEW, _MANY = 16, 2  # parts of a batch: the sizes of micro-batches at which seconds are looked at


def planning_problem(
    config: RunConfig,
    profile_of: Callable[[RunConfig], ModelProfile],
    machine: Machine,
    given: Collection[str],
    *,
    divides: bool = True,
) -> tuple[PlanningProblem, ProfiledSizes]:
    """The problem of a request with ``parallelism=auto``, and the profiles from which it was made.

    Args:
        config: the request, without the rules of a layout.
        profile_of: makes the profile of a request.
        machine: the machine of the ranks.
        given: the keys and groups that the user has chosen.
        divides: whether the model is profiled for each number of ranks that can divide layers, or for one alone.

    Raises:
        RequestError: the model cannot be profiled in one piece.
    """
    ranks = config.parallelism.ranks or 1
    degrees, is_asked = _degrees(config, ranks, given), "parallelism.tensor" in given
    profiled = degrees if divides or is_asked else degrees[:1]
    divisions, left_out = _divisions(config, profile_of, machine, profiled, given)
    profile = divisions[0][1][0]
    draft = _draft(alone(config), profile, machine)
    accelerated = on_accelerator(config, machine.device_memory_bytes)
    cores = shared_cores(_of_ranks(config, ranks), machine.cores, accelerated=accelerated)
    statistics = any(layer.has_running_statistics for layer in profile.layers)
    given_count = config.schedule.microbatches * config.parallelism.data
    problem = PlanningProblem(
        layers=tuple(layer.name for layer in profile.layers),
        divisions=tuple(division for division, _ in divisions),
        ranks=ranks,
        batch=config.data.batch_size,
        memory={each: _limit(config, machine, each) for each in divisors(ranks)},
        links=draft.network,
        orders=_orders(config, given),
        zero=_zero(config, given),
        step_seconds_per_byte=draft.profile.optimizer_seconds_per_byte,
        cores=cores.at_once(1) if cores is not None and not config.hardware.devices else None,
        microbatches=given_count if statistics else None,
        fixed=_fixed(config, given),
        overhead=0.0 if accelerated or profile.seconds_source != "measured" else _ENGINE,
        seconds_source=profile.seconds_source,
        host=draft.host_link if accelerated and _may_move(config) else None,
        left_out=left_out,
        unprofiled=tuple(each for each in degrees if each not in profiled),
        devices=_devices(config, machine, ranks),
        host_update=_host_update(config, draft, given),
        knows_host=draft.host_link.bytes_per_second is not None and profile.seconds_source == "estimated",
    )
    return problem, {division.tensor: profiles for division, profiles in divisions}


def interpolated(profiles: Sequence[ModelProfile], samples: int) -> ModelProfile:
    """The profile of another micro-batch size, on the lines through those that are known.

    Args:
        profiles: one or two profiles, that of the smaller size first.
        samples: the size.
    """
    if len(profiles) == 1 or profiles[0].samples == profiles[1].samples:
        return for_samples(profiles[0], samples)
    return between(profiles[0], profiles[1], samples)


def alone(config: RunConfig, tensor: int = 1, samples: int | None = None) -> RunConfig:
    """The request for one stage and one replica, with micro-batches of about so many samples."""
    made = copy.deepcopy(config)
    made.parallelism = replace(made.parallelism, name="single", pipeline=1, data=1, tensor=tensor, devices=None)
    made.hardware = replace(made.hardware, devices=[])
    if tensor == 1:
        # What says how layers are divided belongs to layers that are.
        made.parallelism = replace(made.parallelism, sharding=None, sequence=False)
    made.schedule = replace(made.schedule, name="1f1b", target=None, chunks=None)
    made.launcher.nodes = None  # one rank is on one node
    if samples is not None:
        made.schedule.microbatches = max(1, config.data.batch_size // samples)
    return made


def _of_ranks(config: RunConfig, ranks: int) -> RunConfig:
    made = alone(config)
    made.parallelism.data, made.launcher.nodes = ranks, config.launcher.nodes
    return made


def _may_move(config: RunConfig) -> bool:
    """Whether rules let a strategy choose what moves to the host."""
    made = alone(config)
    made.offload.activations = "vpipe"
    return not any(each.path == "offload.activations" for each in rules(made))


def _moving(config: RunConfig) -> RunConfig | None:
    """The request with moves of what layers save, as few as memory asks for; None if rules refuse them."""
    made = copy.deepcopy(config)
    made.offload.activations = "greedy"
    before = rules(alone(config))
    return made if not reads_budget(config) and all(each in before for each in rules(alone(made))) else None


def _host_update(config: RunConfig, draft: Draft, given: Collection[str]) -> HostUpdate | None:
    """What an update in the host's memory costs; None where states must stay, or have no other place to go."""
    if not draft.needs.accelerated or not _is_free("offload", given):
        return None
    made = alone(config)
    made.offload.optimizer, made.zero.stage = "cpu", 1
    before = rules(alone(config))
    if any(each not in before for each in rules(made)):
        return None
    copying, updating = host_update_seconds_per_byte(made, draft.profile)
    return HostUpdate(copying, updating, config.hardware.devices_per_node or config.parallelism.ranks or 1)


def _is_free(section: str, given: Collection[str]) -> bool:
    """Whether the user has chosen nothing of a section."""
    return not any(key == section or key.startswith(f"{section}.") for key in given)


def _limit(config: RunConfig, machine: Machine, ranks: int) -> int:
    return memory_limit_bytes(
        config,
        local_ranks=machine.local_ranks or ranks_of_a_node(_of_ranks(config, ranks)),
        device_bytes=machine.device_memory_bytes,
        machine_bytes=machine.memory_bytes,
    )


def _devices(config: RunConfig, machine: Machine, ranks: int) -> tuple[Device, ...]:
    """The device of each rank, if they are unlike."""
    found = devices_of(replace(config, parallelism=replace(config.parallelism, data=1)))
    limits = limits_of(config, found, _limit(config, machine, ranks)) if found else ()
    return tuple(Device(each.name, each.speed, limit) for each, limit in zip(found, limits, strict=True))


def _orders(config: RunConfig, given: Collection[str]) -> tuple[Order, ...]:
    if "schedule" in given and config.schedule.name != "auto":
        name = ALIASES.get(config.schedule.name, config.schedule.name)
        return (Order(name, config.schedule.chunks or SPECS[name].default_chunks or 1),)
    chunks = config.schedule.chunks if "schedule.chunks" in given else None
    return tuple(
        Order(spec.name, chunks or spec.default_chunks or 1)
        for spec in SEARCHED
        if spec.name not in _NEVER_BEST and (chunks is None or spec.default_chunks != 1)
    )


def _zero(config: RunConfig, given: Collection[str]) -> tuple[int | None, ...]:
    if any(key == "zero" or key.startswith("zero.") for key in given):
        return (config.zero.stage,)
    return (None, 1)


def _fixed(config: RunConfig, given: Collection[str]) -> dict[str, object]:
    degrees, found = config.parallelism, dict[str, object]()
    for key in ("pipeline", "data", "tensor"):
        if f"parallelism.{key}" in given:
            found[key] = getattr(degrees, key)
    if "schedule.microbatches" in given:
        found["microbatches"] = config.schedule.microbatches
    if "partition.boundaries" in given and config.partition.boundaries is not None:
        found["boundaries"] = list(config.partition.boundaries)
    return found


def expected_profiles(config: RunConfig, given: Collection[str], *, divides: bool = True) -> list[RunConfig]:
    """The requests of which :func:`planning_problem` will ask for profiles, with the same arguments."""
    few, many = _sizes(config)
    sizes = [few, many if config.hardware.name == "auto" else 1]
    degrees = _degrees(config, config.parallelism.ranks or 1, given)
    profiled = degrees if divides or "parallelism.tensor" in given else degrees[:1]
    return [_cut(config, tensor, samples, given) for tensor in profiled for samples in dict.fromkeys(sizes)]


def _sizes(config: RunConfig) -> list[int]:
    """The samples of micro-batches at which seconds are looked at."""
    batch = config.data.batch_size
    return [max(1, batch // _FEW), max(1, batch // _MANY)]


def _cut(config: RunConfig, tensor: int, samples: int, given: Collection[str]) -> RunConfig:
    """The request of one rank, of which a model that lists no layers is traced and cut, if a pipeline may have it."""
    made = alone(config, tensor, samples)
    if not ("parallelism.pipeline" in given and config.parallelism.pipeline == 1):
        made.parallelism.pipeline = 2
    return made


def _degrees(config: RunConfig, ranks: int, given: Collection[str]) -> list[int]:
    """The numbers of ranks that may divide layers: one, and the number that is asked for or all others."""
    if "parallelism.tensor" in given:
        return sorted({1, config.parallelism.tensor})
    return [tensor for tensor in divisors(ranks) if tensor == 1 or _may_divide(config, tensor)]


def _divisions(
    config: RunConfig,
    profile_of: Callable[[RunConfig], ModelProfile],
    machine: Machine,
    degrees: Sequence[int],
    given: Collection[str],
) -> tuple[list[tuple[Division, list[ModelProfile]]], tuple[str, ...]]:
    """The layers for each number of ranks that can divide them, with the profile of each; and what is left out."""
    found: list[tuple[Division, list[ModelProfile]]] = []
    left_out: dict[str, list[str]] = {}
    for tensor in degrees:
        try:
            found.append(_division(config, profile_of, machine, tensor, given, left_out))
        except RequestError as error:
            if tensor == 1 or "parallelism.tensor" in given:
                raise
            _leave_out(left_out, f"parallelism.tensor={tensor}", error)
    return found, tuple(f"{', '.join(names)} ({reason})" for reason, names in left_out.items())


def _leave_out(left_out: dict[str, list[str]], name: str, error: RequestError) -> None:
    problem = error.problems[0]
    names = left_out.setdefault(f"{problem.rule}: {problem.why}" if problem.why else problem.rule, [])
    if name not in names:
        names.append(name)


def _may_divide(config: RunConfig, tensor: int) -> bool:
    """Whether neighbours within a node can divide layers in so many parts: across nodes it does not pay."""
    per_node = ranks_of_node(config.hardware)
    return per_node is None or per_node % tensor == 0


def _division(
    config: RunConfig,
    profile_of: Callable[[RunConfig], ModelProfile],
    machine: Machine,
    tensor: int,
    given: Collection[str],
    left_out: dict[str, list[str]],
) -> tuple[Division, list[ModelProfile]]:
    """The layers for one number of ranks; why no pipeline can have them is added to ``left_out``."""
    sizes = _sizes(config)

    def profiled(samples: int) -> ModelProfile:
        cut = _cut(config, tensor, samples, given)
        try:
            return profile_of(cut)
        except RequestError as error:  # no pipeline can have it; one rank may
            if cut.parallelism.pipeline == 1:
                raise
            whole = profile_of(alone(config, tensor, samples))
            if len(whole.layers) == 1:
                _leave_out(left_out, "pipelines", error)
            return whole

    profiles = [profiled(sizes[0])]
    if profiles[0].seconds_source != "measured":
        sizes = [1, sizes[0]]  # it costs no measurement, and large models have micro-batches of one sample
        try:
            profiles.insert(0, profiled(1))
        except RequestError:  # a batch norm takes at least two samples
            sizes[0] = sizes[1]
            profiles.insert(0, profiles[0])
    else:
        profiles.append(profiled(sizes[1]))
    shown = profiles
    if tensor > 1 and sizes[0] == sizes[1]:  # the latency of what parts exchange does not grow with the samples
        sizes = [sizes[0], _sizes(config)[1]]
        shown = [profiles[0], for_samples(profiles[0], sizes[1])]
    drafts = [
        _draft(alone(config, tensor, size), each, machine) for size, each in zip(sizes, shown, strict=True)
    ]  # a message's latency is the same for all sizes
    rows = [draft.profile for draft in drafts]
    whole = rows[0]
    merged_rows = [merged(each.layers, each.loss) for each in rows]
    last = len(whole.layers) - 1
    kept = ways_to_keep(config, drafts, given)
    moves = _moving(config) if drafts[0].needs.accelerated and _is_free("offload", given) else None
    division = Division(
        tensor=tensor,
        forward=lines(rows, [[layer.forward_seconds for layer in each] for each in merged_rows]),
        weight=tuple(float(layer.weight_bytes) for layer in merged_rows[0]),
        gradient=tuple(float(layer.gradient_bytes) for layer in merged_rows[0]),
        state=tuple(layer_state_bytes(layer, whole) for layer in whole.layers),
        boundary=tuple(
            0.0 if at == last else layer.output_bytes / whole.samples for at, layer in enumerate(whole.layers)
        ),
        kept=kept,
        moved=moved_ways(moves, drafts, kept) if moves is not None else (),
    )
    return division, profiles


def _draft(config: RunConfig, profile: ModelProfile, machine: Machine) -> Draft:
    return draft_of(config, profile, machine, executed_schedule(config))
