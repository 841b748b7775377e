"""The question that a planner answers, and its answer: plain values without a model, which can be written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from runner.plan.time.network import Network, network_from_json
from runner.plan.values import Link

__all__ = [
    "Device",
    "Division",
    "HostUpdate",
    "Kept",
    "Line",
    "Order",
    "PlanningAnswer",
    "PlanningProblem",
    "problem_from_json",
]


class Line(NamedTuple):
    """Seconds or bytes of a micro-batch of n samples: ``constant + n * each``."""

    constant: float
    each: float

    def of(self, samples: float) -> float:
        """The seconds or bytes of a micro-batch of ``samples`` samples."""
        return self.constant + samples * self.each


Lines: TypeAlias = tuple[Line, ...]
Sizes: TypeAlias = tuple[float, ...]
_LINES = ("saved", "left_to_w", "working", "backward", "input_gradient", "weight_gradient")  # of Kept


@dataclass(frozen=True, slots=True)
class Kept:
    """One way to keep what layers need for their backwards. Tuples are by layer.

    Bytes are lines, too, because part of them is there for any number of samples: autocast saves a cast of each weight.

    Args:
        name: ``none`` (everything is kept), or a policy of ``activation_checkpoint``.
        by_stage: whether stages may differ in it: ``full`` can be asked for layer by layer.
        saved: bytes from the end of a forward to the end of its backward.
        left_to_w: the part of them that stays from I to W.
        working: bytes beside them while the layer's forward or backward runs.
        backward, input_gradient, weight_gradient: seconds of a backward, of I and of W, with what runs again in them,
            and with what forward and backward wait for moves.
        moved: whether what is kept is in the host's memory between forward and backward.
    """

    name: str
    by_stage: bool
    saved: Lines
    left_to_w: Lines
    working: Lines
    backward: Lines
    input_gradient: Lines
    weight_gradient: Lines
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """The layers, if each is divided among so many ranks. Tuples are by layer; the last layer includes the loss.

    Args:
        tensor: the number of ranks.
        forward: seconds of a forward, with what these ranks exchange.
        weight, gradient, state: bytes on a rank of its weights, their gradients and optimizer states.
        boundary: bytes of its output of one sample.
        kept: the ways to keep what its backward needs, the fastest first.
        moved: more ways, which have it in the host's memory meanwhile.
    """

    tensor: int
    forward: Lines
    weight: Sizes
    gradient: Sizes
    state: Sizes
    boundary: Sizes
    kept: tuple[Kept, ...]
    moved: tuple[Kept, ...] = ()

    @property
    def ways(self) -> tuple[Kept, ...]:
        """All ways to keep what a backward needs, those on the device first."""
        return *self.kept, *self.moved


class HostUpdate(NamedTuple):
    """What an update costs whose optimizer states are in the host's memory: seconds for a byte of gradients of copying
    it there and the weights back, and of updating if no other rank does; and the ranks that a host has."""

    copying: float
    updating: float
    ranks: int

    def seconds_per_byte(self, replicas: int) -> float:
        """Seconds for a byte of gradients of a rank, whose replicas update at the same time."""
        return self.copying + self.updating * min(replicas, self.ranks)


class Device(NamedTuple):
    """A device that differs from others: its class, its speed in parts of the described device's, the bytes of a rank
    on it."""

    name: str
    speed: float
    memory: int


class Order(NamedTuple):
    """A published schedule that may be chosen, by its name, with its number of stages per rank."""

    schedule: str
    chunks: int


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A model, machines and what is fixed already.

    Args:
        layers: the names of the layers.
        divisions: what they cost, by the number of ranks that divide them; at least that of one.
        ranks: the number of devices.
        batch: samples of an optimizer step, over all replicas.
        memory: the bytes that a rank may use, by the number of ranks of the layout.
        links: between all ranks.
        orders: the schedules from which a pipeline may choose, the simplest first.
        zero: the stages of ZeRO that replicas may have; None: DDP.
        step_seconds_per_byte: seconds of an optimizer step for a byte of gradients.
        cores: ranks that can compute at full speed at the same time; None: all.
        microbatches: the only allowed product of micro-batches and replicas, as layers see their statistics; None: any.
        fixed: what the user has chosen, of ``pipeline``, ``data``, ``tensor``, ``microbatches``, ``boundaries`` and
            ``kept``.
        overhead: seconds of the engine for each action of a rank, besides its layers.
        seconds_source: ``measured`` or ``estimated``.
        host: between a device and its host's memory, in one direction; None: the device has no memory of its own.
        left_out: what the search does not look at, with the reason, as sentences.
        devices: the device of each rank, in any order, if they are unlike; empty: all are the described one.
        host_update: what the update of optimizer states in the host's memory costs; None: they stay on the device.
        knows_host: whether the seconds of what is in the host's memory are known; if not, it seems to cost nothing.
        unprofiled: numbers of ranks that might divide layers, too, but for which the model was not profiled yet.
    """

    layers: tuple[str, ...]
    divisions: tuple[Division, ...]
    ranks: int
    batch: int
    memory: Mapping[int, int]
    links: Network
    orders: tuple[Order, ...]
    zero: tuple[int | None, ...] = (None,)
    step_seconds_per_byte: float = 0.0
    cores: float | None = None
    microbatches: int | None = None
    fixed: Mapping[str, Any] | None = None
    overhead: float = 0.0
    seconds_source: str = "estimated"
    host: Link | None = None
    left_out: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    host_update: HostUpdate | None = None
    knows_host: bool = True
    unprofiled: tuple[int, ...] = ()

    @property
    def busy_seconds(self) -> float:
        """Seconds of a step in which all ranks compute all the time, with nothing run twice: no layout is shorter."""
        whole = self.divisions[0]
        return self.batch * sum(line.each for line in (*whole.forward, *whole.kept[0].backward)) / self.ranks

    @property
    def without_host(self) -> PlanningProblem:
        """The problem if nothing may be in the host's memory."""
        stays = tuple(replace(each, moved=()) for each in self.divisions)
        return replace(self, divisions=stays, host_update=None)

    @property
    def link(self) -> Link:
        """Between neighbouring ranks."""
        return self.links.inside

    def to_json(self) -> str:
        """The problem as one JSON document; numbers have full precision."""
        return json.dumps(asdict(self))


def problem_from_json(text: str) -> PlanningProblem:
    """The inverse of :meth:`PlanningProblem.to_json`."""
    found = json.loads(text)
    divisions = []
    for each in found.pop("divisions"):
        kept, moved = (tuple(Kept(**_tuples(one, _LINES)) for one in each.pop(key, ())) for key in ("kept", "moved"))
        divisions.append(Division(kept=kept, moved=moved, **_tuples(each, ("forward",))))
    return PlanningProblem(
        layers=tuple(found.pop("layers")),
        divisions=tuple(divisions),
        memory={int(ranks): size for ranks, size in found.pop("memory").items()},
        links=network_from_json(found.pop("links")),
        host=None if (host := found.pop("host", None)) is None else Link(**host),
        host_update=None if (update := found.pop("host_update", None)) is None else HostUpdate(*update),
        orders=tuple(Order(*each) for each in found.pop("orders")),
        zero=tuple(found.pop("zero")),
        left_out=tuple(found.pop("left_out", ())),
        unprofiled=tuple(found.pop("unprofiled", ())),
        devices=tuple(Device(*each) for each in found.pop("devices", ())),
        **found,
    )


def _tuples(document: dict[str, Any], lines: tuple[str, ...]) -> dict[str, Any]:
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    return made | {name: tuple(Line(*each) for each in document[name]) for name in lines}


@dataclass(frozen=True, slots=True)
class PlanningAnswer:
    """A layout that a planner chose.

    Args:
        planner: its name.
        pipeline, data, tensor: the degrees.
        microbatches: the micro-batches of a step and replica.
        order: the schedule; None without a pipeline.
        stages: first and last layer of each stage.
        kept: the name of the way to keep of each stage.
        zero: the stage of ZeRO; None: DDP.
        seconds: a step's seconds by the planner's own cost model.
        peak_bytes: the fullest rank's bytes by its own model; None: it has none.
        needs: what the engine lacks for it, each with the reason; empty if it can run.
        replicas: all ranks that hold each stage, over the replicas of the pipeline; empty: as many as ``data``. If they
            differ, those of one pipeline take the stage's micro-batches in turns.
        again: the layers that run forward again, where that is chosen by layer; None: as ``kept`` says.
        offload: the strategy of ``offload`` that moves what layers save, and says itself what is kept; None: none.
        devices: the class of each stage's device, where they are unlike; empty: they are alike.
        shares: the share of each micro-batch in a replica's samples; empty: all have as many.
        placement: the rank of each stage in a pipeline, where 1f1b has several on a rank; empty: as the order says.
        starts: for a placement, the starts of all forwards and then of the backwards from the last stage, in periods.
        moved: the stages that may move what they keep to the host's memory, as much as their memory asks for.
        states_in_host: whether optimizer states are in the host's memory, and are updated there.
    """

    planner: str
    pipeline: int
    data: int
    tensor: int
    microbatches: int
    order: Order | None
    stages: tuple[tuple[int, int], ...]
    kept: tuple[str, ...]
    zero: int | None
    seconds: float
    peak_bytes: float | None = None
    needs: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    again: tuple[int, ...] | None = None
    offload: str | None = None
    devices: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    placement: tuple[int, ...] = ()
    starts: tuple[float, ...] = ()
    moved: tuple[int, ...] = ()
    states_in_host: bool = False

    @property
    def turns(self) -> tuple[int, ...]:
        """The ranks of one pipeline that take the micro-batches of each stage in turns; empty: one for each stage."""
        return tuple(own // self.data for own in self.replicas) if len(set(self.replicas)) > 1 else ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    def overrides(self, chunks_of: Mapping[str, int | None]) -> dict[str, Any]:
        """The keys that ask for it, with their values, in the order of a command line.

        Args:
            chunks_of: each schedule's own number of chunks, which need not be said.
        """
        keys: dict[str, Any] = {
            "parallelism.pipeline": self.pipeline,
            "parallelism.data": self.data,
            "parallelism.tensor": self.tensor,
        }
        if self.order is not None:
            keys["schedule"] = self.order.schedule
            if self.order.chunks != chunks_of.get(self.order.schedule):
                keys["schedule.chunks"] = self.order.chunks
        if self.turns:
            keys["schedule.replicas"] = list(self.turns)
        if self.placement:
            keys["schedule.placement"], keys["schedule.starts"] = list(self.placement), list(self.starts)
        keys["schedule.microbatches"] = self.microbatches
        if self.shares:
            keys["schedule.shares"] = list(self.shares)
        keys["zero.stage"] = self.zero
        if self.pipeline > 1:
            keys["partition"] = "manual"
            keys["partition.boundaries"] = [first for first, _ in self.stages[1:]]
        if self.devices:
            keys["parallelism.devices"] = list(self.devices)
        again = self._layers_again()
        if self.offload is not None:
            keys["activation_checkpoint"], keys["offload"] = "none", self.offload
        elif again is None:
            keys["activation_checkpoint"] = self.kept[0]
        else:
            keys["activation_checkpoint"] = "manual"
            keys["activation_checkpoint.layers"] = [str(layer) for layer in again]
        if self.moved:
            keys["offload.activations"] = "greedy"
        if self.states_in_host:
            keys["offload.optimizer"] = "cpu"
        return keys

    def _layers_again(self) -> list[int] | None:
        """The layers that run forward again, if they must be named; None: one way to keep is that of all stages."""
        if self.again is not None and 0 < len(self.again) <= self.stages[-1][1]:
            return list(self.again)
        if len(set(self.kept)) == 1:
            return None
        stages = zip(self.stages, self.kept, strict=True)
        return [layer for (first, last), kept in stages if kept != "none" for layer in range(first, last + 1)]
