"""The frozen results of planning, and the measurements that it may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.errors import Problem
from runner.files import write_atomically
from runner.memory.solve.residency import RankTurns, Traffic
from runner.memory.solve.static_arena import ArenaFigures
from runner.memory.solve.values import ActivationPlan
from runner.memory.solve.weight_strategy import WeightPlan
from runner.plan.cautions import Caution
from runner.plan.choice_notes import choice_document
from runner.plan.cut.partition import Partition
from runner.plan.devices import DeviceClass
from runner.plan.layout.topology import Topology
from runner.plan.prediction import Prediction
from runner.plan.stages.figures import StageFigures
from runner.plan.work import Work
from runner.profile import ModelProfile, SecondsSource
from runner.schedule.render.document import filling_document
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Program, Schedule
from runner.stored import read_value, value_text

__all__ = [
    "PLAN_FILE",
    "Link",
    "MemoryParts",
    "MemoryPrediction",
    "RunPlan",
    "StageSeconds",
    "StateBytes",
    "TimePrediction",
]

PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The parts of a rank's memory at one moment, in bytes.

    Args:
        weights: parameters and buffers of its stages.
        gradients: the persistent flat gradient buffer.
        optimizer: optimizer states and, at the optimizer step, its temporaries.
        activations: tensors that autograd saved for micro-batches in flight, and temporaries of the running layer.
        buffers: the step's batch, received boundary tensors and gradients, and gradients that are being sent.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def as_dict(self) -> dict[str, int]:
        """The parts by name, in this order."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def with_total(self, total: int) -> MemoryParts:
        """The parts whose sum is ``total``: what is too much is taken from activations, then from the next part that
        has temporaries."""
        excess, parts = self.total - total, self.as_dict()
        parts["activations"] -= min(excess, parts["activations"])
        for name in ("buffers", "optimizer", "gradients", "weights"):
            excess = sum(parts.values()) - total
            parts[name] -= min(excess, parts[name])
        return MemoryParts(**parts)

    def largest(self) -> str:
        """The name of the largest part."""
        parts = self.as_dict()
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The bytes that are held from one step to the next.

    Args:
        weights, gradients, optimizer, buffers: bytes on the device.
        host: bytes in the host's memory: what was offloaded, with the copies that are sent. If the device is the CPU,
            this is the same memory.
        drive: bytes in swap files.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0
    drive: int = 0

    @property
    def device(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Each rank's memory at its peak; the sum of its parts is the peak. Tuples are indexed by pipe position.

    Args:
        parts: the parts of the device's memory; those of the fullest replica.
        host: bytes that are offloaded to the host's memory from a device with its own memory.
        states: bytes of weights, gradients and optimizer states between backwards.
        of_replicas: the parts of each replica, for each pipe position; empty if all replicas have the same.
        is_rehearsed: whether the peaks were counted in a run on tensors without memory, and not derived.
    """

    parts: tuple[MemoryParts, ...]
    host: tuple[int, ...] = ()
    states: tuple[StateBytes, ...] = ()
    of_replicas: tuple[tuple[MemoryParts, ...], ...] = ()
    is_rehearsed: bool = False

    def counted(self, peaks: Sequence[int]) -> MemoryPrediction:
        """The prediction with peaks that were counted, by pipe position.

        What a derived peak has too much or too little is taken to be in the activations, whose parts are bounds.
        """
        parts = tuple(map(MemoryParts.with_total, self.parts, peaks))
        return replace(self, parts=parts, of_replicas=(), is_rehearsed=True)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak of each rank."""
        return tuple(parts.total for parts in self.parts)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Durations of whole stages, measured with all ranks busy; tuples are indexed by global stage.

    Args:
        forward, backward: seconds for one micro-batch of the run's own size; the last stage includes the loss.
        input_gradient, weight_gradient: the parts of a split backward; empty if none is split.
        step: the optimizer step of the stage.
        message: from the time when a boundary tensor is ready on one rank to the time when the next can use it.
        reduce: gradient all-reduce of the stage; empty if there is one replica.
        window: from the end of one rehearsed window, which has no update, to the end of the next; None if it was not
            measured. It also holds what the parts do not: the engine's time for each action, wake-ups of messages, and
            the waits of ranks that share cores.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: tuple[float, ...]
    message: float = 0.0
    reduce: tuple[float, ...] = ()
    input_gradient: tuple[float, ...] = ()
    weight_gradient: tuple[float, ...] = ()
    window: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between neighbouring ranks: a message of n bytes takes latency + n / bytes_per_second."""

    latency_seconds: float = 0.0
    bytes_per_second: float | None = None  # None: not known, messages cost only the latency

    def seconds(self, num_bytes: float) -> float:
        """The seconds of one message."""
        return self.latency_seconds + self.transfer_seconds(num_bytes) if num_bytes else 0.0

    def transfer_seconds(self, num_bytes: float) -> float:
        """The part of a message's seconds in which no other message can use the link."""
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def slowed(self, delay_seconds: float, bytes_per_second: float | None) -> Link:
        """The combination of this link with a slower one, which a message passes first."""
        speeds = [speed for speed in (self.bytes_per_second, bytes_per_second) if speed]
        seconds_per_byte = sum(1 / speed for speed in speeds)
        return Link(self.latency_seconds + delay_seconds, 1 / seconds_per_byte if speeds else None)


@dataclass(frozen=True, slots=True)
class TimePrediction:
    """The predicted time of one optimizer step.

    Args:
        step_seconds: from the first action to the end of the last rank's optimizer step; in a run, with what a step
            takes besides.
        bubble_ratio: idle / total rank time over the flushed span of the pipeline's forwards and backwards.
        busy_seconds: for each pipe position, seconds in forwards, backwards and work that fills the bubbles.
        source: whether the seconds were measured or estimated.
        costs: the durations, in seconds, with which the schedule was simulated.
        fill_seconds: the part of ``busy_seconds`` in work that fills the bubbles; empty if there is none.
        alone_seconds: what ``step_seconds`` would be if no ranks shared cores; None if none do. The bubble is of a
            pipeline whose ranks share none.
        host_seconds: the part of ``busy_seconds`` in which forwards and backwards wait for moves to the host's memory
            and back; empty if nothing is moved, or if the seconds were measured and contain it.
        expected: between which seconds a step is expected to be, by what is known of errors; None: it was rehearsed.
    """

    step_seconds: float
    bubble_ratio: float
    busy_seconds: tuple[float, ...]
    source: SecondsSource
    costs: StageCosts
    fill_seconds: tuple[float, ...] = ()
    alone_seconds: float | None = None
    host_seconds: tuple[float, ...] = ()
    expected: tuple[float, float] | None = None

    @property
    def utilisation_without_fills(self) -> float:
        """The share of rank time in forwards and backwards."""
        busy = sum(self.busy_seconds)
        return (1.0 - self.bubble_ratio) * (busy - sum(self.fill_seconds)) / busy if busy else 0.0


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before a process exists. Tuples by position are for one replica's pipeline.

    Args:
        layout: degrees and world size.
        topology: the seats of all ranks.
        schedule, program: the pipeline's compute order, and the same with messages, reductions and steps.
        partition: first and last layer of each stage, inclusive.
        profile: the profile for this run's largest micro-batch, without activation policies.
        figures: the figures of each stage, with activation policies.
        in_flight: for each stage, the most micro-batches between their forward and the end of their backward.
        activations: which tensors are kept between forward and backward, and where.
        memory, time: predictions.
        prediction: the predictions of weights by which gradients are computed; None: there are none.
        memory_limit_bytes: the memory limit of one rank whose device is the described one.
        host_limit_bytes: the limit for what one rank offloads to the host's memory; None if it is not known.
        advice: lines that say what would make it fit, whether pipelining pays, and what is not known.
        cautions: the notes that a run repeats when it starts.
        problems: broken rules; a plan with problems must not start.
        reasons: lines that say why the plan chose what the request left open, and what speaks for its layout.
        work: what a step computes.
        gradient_bytes_sent: bytes of gradients that all ranks send in a mean step; None: not predicted.
        tensor_bytes_sent: bytes that all ranks send in a mean step where they divide layers; None: not predicted.
        host_activation_bytes: bytes of activations that all ranks move to their hosts' memory in a step; as many come
            back.
        weights: which weights are at home in the host's memory.
        turns: for each pipeline rank, when they are on the device; empty if none are at home there.
        arenas: how large one piece of memory must be that holds what each stage saves and needs; empty unless the
            strategy of ``offload.activations`` plans it.
        devices: the device of each pipeline rank; empty if all are the described one.
        device_limits: the memory limit of each pipeline rank; empty if all have that of the described device.
        cuts: if layers move between stages while the run trains: the steps after which the run has other stages, from 0
            on, each with the plan of these stages. The memory is then that of the whole run, with the moves; its states
            are those of the last stages.
    """

    layout: dict[str, int]
    topology: Topology
    schedule: Schedule
    program: Program
    partition: Partition
    profile: ModelProfile
    figures: tuple[StageFigures, ...]
    in_flight: tuple[int, ...]
    activations: ActivationPlan
    memory: MemoryPrediction
    time: TimePrediction
    memory_limit_bytes: int
    host_limit_bytes: int | None = None
    prediction: Prediction | None = None
    advice: tuple[str, ...] = ()
    cautions: tuple[Caution, ...] = ()
    problems: tuple[Problem, ...] = ()
    reasons: tuple[str, ...] = ()
    work: Work = Work()
    gradient_bytes_sent: float | None = None
    tensor_bytes_sent: float | None = None
    host_activation_bytes: float = 0.0
    weights: WeightPlan = WeightPlan()
    turns: tuple[RankTurns, ...] = ()
    arenas: tuple[ArenaFigures, ...] = ()
    devices: tuple[DeviceClass, ...] = ()
    device_limits: tuple[int, ...] = ()
    cuts: tuple[tuple[int, RunPlan], ...] = ()

    def at(self, step: int) -> RunPlan:
        """The plan with the stages that it has after ``step`` steps of a run."""
        found = [plan for begins, plan in self.cuts if begins <= step]
        return replace(found[-1], memory=self.memory, cuts=self.cuts) if found else self

    def save(self, run_dir: Path) -> None:
        """Write the plan into a run's directory, for its ranks and for whoever continues or reads the run."""
        write_atomically(run_dir / PLAN_FILE, value_text(self))

    @classmethod
    def load(cls, run_dir: Path) -> RunPlan:
        """The plan of a run, as its command made it.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or its version of the runner stored plans otherwise.
        """
        path = run_dir / PLAN_FILE
        try:
            found = read_value(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged, or of another version of the runner: {error}") from error
        if not isinstance(found, cls):
            raise ValueError(f"{path} holds no plan")
        return found

    @property
    def host_weight_bytes(self) -> Traffic:
        """Bytes of weights that all ranks fetch from their hosts in a step, and of gradients that they send there."""
        moved = [rank.traffic for rank in self.turns]
        ranks = self.layout["data"] * self.layout["tensor"]
        return Traffic(ranks * sum(one.weights for one in moved), ranks * sum(one.gradients for one in moved))

    @property
    def has_bubble(self) -> bool:
        """Whether ranks wait for the neighbours of their stage. One stage has none: replicas wait for sums alone."""
        return self.layout["pipeline"] > 1

    @property
    def fits(self) -> bool:
        """Whether each rank's predicted peak is within its limit, and offloaded values fit into the host's memory."""
        return self.lacks_bytes <= 0 and self.fits_host

    def limit_of(self, rank: int) -> int:
        """The memory limit of a global rank."""
        return (
            self.device_limits[self.topology.coordinates(rank).pipe] if self.device_limits else self.memory_limit_bytes
        )

    @property
    def fullest(self) -> int:
        """The global rank whose predicted peak is the nearest to its limit, or the furthest above it."""
        peaks = self.peak_memory_bytes
        return max(range(len(peaks)), key=lambda rank: peaks[rank] - self.limit_of(rank))

    @property
    def lacks_bytes(self) -> int:
        """The most by which a rank's predicted peak is above its limit; below 0 if all are within theirs."""
        if not self.device_limits:
            return max(self.memory.peak_bytes) - self.memory_limit_bytes
        return max(peak - limit for peak, limit in zip(self.memory.peak_bytes, self.device_limits, strict=True))

    @property
    def fits_host(self) -> bool:
        """Whether offloaded values fit into the host's memory; true if its size is not known."""
        return self.host_limit_bytes is None or max(self.memory.host, default=0) <= self.host_limit_bytes

    @property
    def host_memory_bytes(self) -> tuple[int, ...]:
        """The bytes that each rank offloads to its host, by global rank."""
        positions = (self.topology.coordinates(rank).pipe for rank in range(self.topology.world_size))
        return tuple(self.memory.host[position] for position in positions)

    @property
    def host_seconds(self) -> tuple[float, ...]:
        """The time in which each rank's computes wait for moves to the host, by global rank; empty if not predicted."""
        positions = (self.topology.coordinates(rank).pipe for rank in range(self.topology.world_size))
        return tuple(self.time.host_seconds[position] for position in positions) if self.time.host_seconds else ()

    @property
    def rank_parts(self) -> tuple[MemoryParts, ...]:
        """The memory parts by global rank."""
        places = [self.topology.coordinates(rank) for rank in range(self.topology.world_size)]
        if self.memory.of_replicas:
            return tuple(self.memory.of_replicas[place.pipe][place.data] for place in places)
        return tuple(self.memory.parts[place.pipe] for place in places)

    @property
    def state_bytes(self) -> tuple[dict[str, int], ...]:
        """Bytes of weights, gradients and optimizer states on the device, and on the host, by global rank."""
        positions = (self.topology.coordinates(rank).pipe for rank in range(self.topology.world_size))
        names = ("weights", "gradients", "optimizer", "host")
        return tuple({name: getattr(self.memory.states[position], name) for name in names} for position in positions)

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The predicted peaks by global rank."""
        return tuple(parts.total for parts in self.rank_parts)

    def _measurement(self) -> dict[str, Any]:
        """When the model's seconds were measured, and what other work took meanwhile; empty if they were not."""
        profile = self.profile
        if self.time.source != "measured" or profile.measured_at is None:
            return {}
        made: dict[str, Any] = {"at": datetime.fromtimestamp(profile.measured_at, UTC).isoformat(timespec="seconds")}
        return {"seconds_measured": made | {"age_seconds": profile.age_seconds, "busy_share": profile.busy_share}}

    def to_json(self) -> dict[str, Any]:
        """The document of ``runner plan --json``."""
        return {
            "fits": self.fits,
            "memory_limit_bytes": self.memory_limit_bytes,
            **self._devices(),
            "peak_memory_bytes": list(self.peak_memory_bytes),
            **({"peak_memory_source": "rehearsed"} if self.memory.is_rehearsed else {}),
            "parts": [parts.as_dict() for parts in self.rank_parts],
            "step_seconds": self.time.step_seconds,
            "seconds_source": self.time.source,
            **({"step_seconds_expected": list(self.time.expected)} if self.time.expected is not None else {}),
            **self._measurement(),
            "bubble_ratio": self.time.bubble_ratio,
            "partition": [list(layers) for layers in self.partition],
            **({"cuts": [_cut_document(*each) for each in self.cuts]} if self.cuts else {}),
            "layout": dict(self.layout),
            "problems": [problem.line() for problem in self.problems],
            "state_bytes": list(self.state_bytes),
            "host_memory_bytes": list(self.host_memory_bytes),
            "host_memory_limit_bytes": self.host_limit_bytes,
            **filling_document(self.schedule, self.time.bubble_ratio, self.time.utilisation_without_fills),
            "advice": list(self.advice),
            **{key: list(parts) for key, parts in self.profile.parts_named.items()},
            "in_flight_microbatches": list(self.in_flight),
            "bytes_moved": {
                "weight_gradients": self.gradient_bytes_sent,
                "tensor": self.tensor_bytes_sent,
                "host_activations": 2 * self.host_activation_bytes,
                "host_weights": self.host_weight_bytes.weights,
                "host_weight_gradients": self.host_weight_bytes.gradients,
            },
            "offload_seconds": list(self.host_seconds),
            **({"activation_choices": choice_document(self.activations.choices)} if self.activations.choices else {}),
            **({"activation_arenas": [asdict(each) for each in self.arenas]} if self.arenas else {}),
            **({"host_weights": self.weights.to_json()} if self.turns else {}),
            **self._schedule_and_work(),
        }

    def _devices(self) -> dict[str, Any]:
        """The part of the document about devices that are unlike, by global rank."""
        if not self.devices:
            return {}
        ranks = range(self.topology.world_size)
        own = [self.devices[self.topology.coordinates(rank).pipe] for rank in ranks]
        return {"devices": [each.name for each in own], "memory_limits_bytes": [self.limit_of(rank) for rank in ranks]}

    def _schedule_and_work(self) -> dict[str, Any]:
        """The part of the document about the schedule that was asked for or chosen, the model and its speed."""
        schedule, profile, work, seconds = self.schedule, self.profile, self.work, self.time.step_seconds
        return {
            "schedule": schedule.name,
            "microbatches": schedule.microbatches // schedule.windows // schedule.parts,
            "chunks": schedule.chunks,
            "parameters": profile.num_parameters,
            "trained_parameters": profile.num_trained,
            "layers": len(profile.layers),
            "input_shapes": [[profile.samples, *shape] for shape in profile.sample_shapes],
            "samples_per_step": work.samples,
            "tokens_per_step": work.tokens,
            "samples_per_second": work.samples_per_second(seconds),
            "tokens_per_second": work.tokens_per_second(seconds),
            "mfu": work.mfu(seconds),
        }


def _cut_document(step: int, plan: RunPlan) -> dict[str, Any]:
    """What the document says of stages that a run has after so many steps; the peaks are those of these stages."""
    return {
        "after_step": step,
        "partition": [list(layers) for layers in plan.partition],
        "peak_memory_bytes": list(plan.peak_memory_bytes),
        "step_seconds": plan.time.step_seconds,
    }
