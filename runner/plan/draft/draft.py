"""The draft of a plan: the numbers that follow from a request before its stages are cut."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.cores import SharedCores, shared_cores
from runner.plan.devices import DeviceClass, devices_of, limits_of
from runner.plan.layout import batches
from runner.plan.memory.extra import ExtraCopies, older_versions
from runner.plan.memory.limits import host_memory_bytes, memory_limit_bytes, on_accelerator, ranks_of_a_node
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.zero import averages_per_gradient_byte, flattened_bytes, sharing_of
from runner.plan.prediction import Prediction, prediction_of
from runner.plan.rules.zero import shares_by_itself
from runner.plan.stages.scale import for_samples
from runner.plan.time.network import Network, network_of
from runner.plan.time.tensor import with_exchanges
from runner.plan.values import Link
from runner.profile import ModelProfile
from runner.schedule.values import Schedule

__all__ = ["Draft", "Layout", "Machine", "draft_of"]


_FLOAT64_BYTES = 8
_AVERAGING = 2  # temporary tensors of the size of a weight with which averaging moves weights


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine that are not in the request.

    Args:
        link: the measured link between ranks; None if it was not measured.
        local_ranks: number of ranks that share this machine's memory; None: those of a node.
        device_memory_bytes: memory of this machine's accelerator, if the run uses one.
        cores: cores that the ranks of a local run may use; None: as many as they need.
        memory_bytes: memory of the machine with the least; None: of this one.
    """

    link: Link | None
    local_ranks: int | None
    device_memory_bytes: int | None
    cores: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees of a request."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    def to_json(self) -> dict[str, int]:
        """The ``layout`` of the plan's JSON form."""
        return asdict(self) | {"world_size": self.world_size}


@dataclass(frozen=True, slots=True)
class Draft:
    """A request, its model and its schedule, with the numbers that follow from them before stages are cut.

    Args:
        config: the request.
        profile: the profile for the step's largest micro-batch.
        schedule: the schedule of one replica.
        layout: the degrees.
        network: the measured or stated links between ranks, slowed down if the request says so.
        host_link: the stated link between a device and its host, in one direction, slowed down if the request says so.
        mean_samples: mean number of samples of the step's micro-batches.
        limit_bytes: the most memory that a rank may use whose device is the described one.
        host_limit_bytes: a rank's part of the host's memory; None if it is not known.
        needs: inputs of the memory prediction besides the layers.
        prediction: the predictions of weights by which gradients are computed; None: there are none.
        shared: the cores that the ranks share; None if every rank has its own.
        devices: the device of each rank of the pipeline; empty if all are the described one.
        cores: cores of the ranks' machine; None: the plan does not count them.
    """

    config: RunConfig
    profile: ModelProfile
    schedule: Schedule
    layout: Layout
    network: Network
    host_link: Link
    mean_samples: float
    limit_bytes: int
    host_limit_bytes: int | None
    needs: MemoryNeeds
    prediction: Prediction | None
    shared: SharedCores | None = None
    devices: tuple[DeviceClass, ...] = ()
    cores: int | None = None

    @property
    def link(self) -> Link:
        """The link between neighbouring ranks."""
        return self.network.inside

    @property
    def limits(self) -> tuple[int, ...]:
        """The most memory that each rank of the pipeline may use."""
        if self.devices:
            return limits_of(self.config, self.devices, self.limit_bytes)
        return (self.limit_bytes,) * self.schedule.ranks


def draft_of(config: RunConfig, profile: ModelProfile, machine: Machine, schedule: Schedule) -> Draft:
    """Make the draft of a request without problems.

    Args:
        config: the request.
        profile: the profile of its model, for any micro-batch size.
        machine: the machine of the ranks.
        schedule: the schedule that is planned.
    """
    degrees = config.parallelism
    layout = Layout(degrees.pipeline, degrees.data, degrees.tensor)
    step = config.data.batch_size, degrees.data, config.schedule.parts
    profile = _with_states_that_are_made(config, for_samples(profile, batches.largest_microbatch(*step)), schedule)
    local_ranks = machine.local_ranks or ranks_of_a_node(config)
    prediction, network = prediction_of(config, schedule), network_of(config, machine.link)
    return Draft(
        config=config,
        profile=with_exchanges(profile, degrees.tensor, network.parts(degrees.tensor)),
        schedule=schedule,
        layout=layout,
        network=network,
        host_link=_host_link(config),
        mean_samples=batches.mean_microbatch(*step),
        limit_bytes=memory_limit_bytes(
            config,
            local_ranks=local_ranks,
            device_bytes=machine.device_memory_bytes,
            machine_bytes=machine.memory_bytes,
        ),
        host_limit_bytes=host_memory_bytes(config, local_ranks=local_ranks, machine_bytes=machine.memory_bytes),
        needs=_memory_needs(config, profile, machine, schedule, prediction),
        prediction=prediction,
        shared=_shared_cores(config, machine),
        devices=devices_of(config),
        cores=machine.cores,
    )


def _with_states_that_are_made(config: RunConfig, profile: ModelProfile, schedule: Schedule) -> ModelProfile:
    """The profile, without what it knows of weights that no gradient reaches if they may have states nevertheless.

    ZeRO keeps states of flat parts. A compressor gives gradients to all weights, a weight that moves to the host or has
    several copies takes its states along, a callback may change the model, and what is resumed may have reached others.
    """
    offload, order = config.offload, config.schedule
    elsewhere = any(each != "none" for each in (offload.optimizer, offload.parameters, offload.weights))
    as_one = config.zero.stage is None and config.compression.name == "none" and config.resume is None
    as_one = as_one and not (elsewhere or config.callbacks)
    if as_one and not (order.post_validation or schedule.is_asynchronous or schedule.own_weights):
        return profile
    return replace(profile, layers=tuple(replace(each, unreached=()) for each in profile.layers))


def _shared_cores(config: RunConfig, machine: Machine) -> SharedCores | None:
    """The cores that ranks share; a plan of unlike devices is about these, and not about this machine's cores."""
    if config.hardware.devices:
        return None
    return shared_cores(config, machine.cores, accelerated=on_accelerator(config, machine.device_memory_bytes))


def _host_link(config: RunConfig) -> Link:
    link = Link(bytes_per_second=config.hardware.host_link_bytes_per_second)
    return link.slowed(config.offload.delay_seconds, config.offload.bytes_per_second)


def _memory_needs(
    config: RunConfig, profile: ModelProfile, machine: Machine, schedule: Schedule, prediction: Prediction | None
) -> MemoryNeeds:
    data = config.parallelism.data
    kind = optimizer_of(config.optimizer)
    temporaries, lingering = kind.temporaries_of(config.optimizer, weight_widths(config)[1]), kind.lingering
    at_once = kind.at_once(data) / weight_widths(config)[0] if kind.at_once is not None else 0.0
    if (own := profile.own_update) is not None:
        temporaries, lingering = own.temporaries, own.lingering
        at_once = own.at_once * weight_widths(config)[1] / weight_widths(config)[0]
    if schedule.own_weights:
        # The copies of a weight are updated one after the other: one's last temporary is there when the next are made.
        temporaries, lingering = max(temporaries + bool(temporaries), _AVERAGING), 0
    by_itself = shares_by_itself(config, schedule)
    return MemoryNeeds(
        batch_samples=batches.split_sizes(config.data.batch_size, data)[0],
        temporaries=temporaries,
        lingering=lingering,
        in_any_order=own is not None and own.in_groups,
        whole_temporaries=kind.halves(weight_widths(config)[1]) if kind.whole_matrices else 0,
        norm_copies=_FLOAT64_BYTES // weight_widths(config)[1] if config.trainer.grad_clip_norm is not None else 0,
        at_once=at_once,
        sharing=None if by_itself else sharing_of(config, profile, temporaries),
        states_over=data if by_itself else None,
        averages=averages_per_gradient_byte(config),
        flattened=flattened_bytes(config),
        accelerated=on_accelerator(config, machine.device_memory_bytes),
        extra=_extra_copies(schedule, prediction, data),
        backup=config.schedule.post_validation,
        copied_by=data if config.checkpoint.asynchronous else None,
    )


def _extra_copies(schedule: Schedule, prediction: Prediction | None, replicas: int) -> tuple[ExtraCopies, ...]:
    """What each stage holds besides its newest weights: a predicted stage keeps predictions instead of versions."""
    older = older_versions(schedule, replicas)
    if prediction is None:
        return older
    return tuple(
        ExtraCopies(prediction.copies[stage], prediction.values, prediction.kind.temporaries)
        if gaps is not None
        else older[stage]
        for stage, gaps in enumerate(prediction.stages)
    )
