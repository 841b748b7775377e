"""Predicts how much memory torch's allocator reserves on a device under ZeRO, by a simulation of a few steps.

All allocations of one rank are simulated. Those of the forward and backward come from a trace. To these, the simulation
adds the buffers of the runner and DeepSpeed 0.19.8: flat partitions, buckets and their flat copies, and gathered
weights. More memory is reserved than is ever allocated at once, because a freed block can only be used for requests
that fit into it.

The simulation is simplified: the weights of a layer are gathered in one block, there is one stream, and the memory of
CUDA's context and NCCL is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from runner.config.compose.resolve import resolve
from runner.config.deepspeed import MOST_PREFETCHED
from runner.config.precision import weight_widths
from runner.config.schema import RunConfig
from runner.optim.catalogue.kind import ERROR_WIDTH
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.memory.limits import on_accelerator
from runner.plan.memory.zero import FLATTENED, MOST_GATHERED
from runner.profiling.model import example_microbatch
from runner.recipes.benchmarks.caching_allocator import CachingAllocator
from runner.recipes.benchmarks.memory_trace import MemoryTrace, trace_of

__all__ = [
    "Rank",
    "Replicated",
    "Shared",
    "SharedStates",
    "SharedWeights",
    "predict_reserved",
    "reserved_by_request",
]

K = TypeVar("K", bound=Hashable)

_STEPS = 3  # the second step has the optimizer's states; after the third, nothing new is reserved
_WIDE = 4
_UNKNOWN_VALUES = 2.0  # values per element, as of Adam, for an optimizer whose number of values is not known


def _is_simulated(config: RunConfig) -> bool:
    """Whether a request under ZeRO has one stage on an accelerator, one micro-batch and no recomputation."""
    plain = (
        config.activation_checkpoint.name == "none" and config.offload.activations == config.offload.weights == "none"
    )
    whole = config.parallelism.pipeline * config.parallelism.tensor * config.schedule.microbatches == 1
    there = config.offload.parameters == "none" and config.offload.delay_from is None and not config.compile
    return plain and whole and there and on_accelerator(config)


def predict_reserved(
    config: RunConfig, trace: MemoryTrace | None = None, *, stages: Sequence[type[Rank]] | None = None
) -> int | None:
    """The peak of the reserved bytes; None if the request cannot be simulated.

    Args:
        config: the request.
        trace: the trace of the step's only micro-batch; None: it is recorded here.
        stages: what a rank allocates under each stage of ZeRO, 0 to 3; default: what it does here.
    """
    if config.zero.stage is None or not _is_simulated(config):
        return None
    rules = stages or (Replicated, SharedStates, SharedStates, SharedWeights)
    rank = rules[config.zero.stage](config, trace or trace_of(config, *example_microbatch(config)))
    for _ in range(_STEPS):
        rank.step()
    return rank.memory.most_reserved


def reserved_by_request(requests: Mapping[K, Sequence[str]]) -> dict[K, int]:
    """The peak of the reserved bytes of each request that can be simulated.

    Args:
        requests: overrides by any key; all have the same model, data and precision, so that one trace is enough.
    """
    configs = {key: resolve(list(overrides)) for key, overrides in requests.items()}
    if not configs:
        return {}
    first = next(iter(configs.values()))
    trace = trace_of(first, *example_microbatch(first))
    found = {key: predict_reserved(config, trace) for key, config in configs.items()}
    return {key: num_bytes for key, num_bytes in found.items() if num_bytes is not None}


class Rank:
    """The allocations of one rank. Subclasses add what is allocated besides the trace."""

    def __init__(self, config: RunConfig, trace: MemoryTrace) -> None:
        self.memory = CachingAllocator()
        self.trace = trace
        self.stage = config.zero.stage
        self.replicas = config.parallelism.data
        self.width, self.master = weight_widths(config)
        self.elements = sum(trace.parameters)
        self.bucket = min(config.zero.bucket_elements, self.elements)
        self.offloaded = config.offload.optimizer != "none"
        self.kind = optimizer_of(config.optimizer)
        self.temporaries = self.kind.temporaries
        self._momentum = self.kind.keeps_momentum(config.optimizer)
        self._names = itertools.count()
        self._steps = 0
        self.prepare()

    def prepare(self) -> None:
        """Allocate what exists before the first step."""

    def layer_done(self, layer: int) -> None:
        """Do what follows the forward of a layer."""

    def backward_begins(self) -> None:
        """Do what follows the loss, before the backward."""

    def gradient(self, name: Hashable, parameter: int) -> None:
        """Do what follows the gradient of a parameter, which is allocated under ``name``."""

    def backward_ends(self) -> None:
        """Do what follows the backward, when all gradients are complete."""

    def update(self, *, first: bool) -> None:
        """Do the optimizer's update; ``first`` says whether it is the first one."""

    def step(self) -> None:
        """Do one optimizer step."""
        for kind, number, value in self.trace.events:
            name = ("trace", self._steps, number)
            if kind == "+":
                self.memory.allocate(name, value)
            elif kind == "-":
                self._end(name)
            elif kind == "layer":
                self.layer_done(number)
            elif kind == "backward":
                self.backward_begins()
            else:
                self.gradient(name, value)
        self.backward_ends()
        self.update(first=self._steps == 0)
        for _, number, _ in self.trace.events:
            self._end(("trace", self._steps, number))
        self._steps += 1

    def _end(self, name: Hashable) -> None:
        """Release something that the trace holds; gradients may have been released before."""
        if self.memory.holds(name):
            self.memory.release(name)

    def hold(self, num_bytes: float) -> Hashable:
        name = ("own", next(self._names))
        self.memory.allocate(name, round(num_bytes))
        return name

    def pass_by(self, num_bytes: float) -> None:
        """Allocate ``num_bytes`` and release them at once."""
        self.memory.release(self.hold(num_bytes))

    def hold_states(self, elements: int) -> None:
        """Allocate the optimizer's states of a tensor with ``elements`` elements, one allocation for each value."""
        known = self.kind.state_bytes
        values = (_UNKNOWN_VALUES if self.kind.values is None else self.kind.values) + self._momentum
        total = known(elements) if known is not None else values * self.master * elements
        count = max(1, round(values))
        for _ in range(count if total else 0):
            self.hold(total / count)


class Replicated(Rank):
    """Stage 0: nothing is sharded. Gradients are in one buffer; DeepSpeed copies them into flat tensors to sum them."""

    def prepare(self) -> None:
        for elements in self.trace.parameters:
            self.hold(elements * self.width)
            if self.master > self.width:
                self.hold(elements * self.master)
        self.hold(self.elements * self.width)

    def gradient(self, name: Hashable, parameter: int) -> None:
        self.memory.release(name)

    def backward_ends(self) -> None:
        copied = 0
        for elements in self.trace.parameters:
            copied += elements
            if copied > FLATTENED:
                self.pass_by(copied * self.width)
                copied = 0
        self.pass_by(copied * self.width)

    def update(self, *, first: bool) -> None:
        wide = self.hold(self.elements * self.master) if self.master > self.width else None
        if first and self.kind.compresses:
            self.hold(ERROR_WIDTH * self.elements)
            self.hold(ERROR_WIDTH * self.elements / self.replicas)
        for elements in self.trace.parameters:
            if first:
                self.hold_states(elements)
            for name in [self.hold(elements * self.master) for _ in range(self.temporaries)]:
                self.memory.release(name)
        if wide is not None:
            self.memory.release(wide)


class Shared(Rank):
    """Stages 1 to 3: the optimizer updates a partition of the weights, and gradients are reduced in buckets."""

    @property
    def part(self) -> int:
        """The number of elements of a partition, padded."""
        aligned = 2 * self.replicas
        return -(-self.elements // aligned) * aligned // self.replicas

    def prepare(self) -> None:
        if self.offloaded:
            self.hold(max(self.trace.parameters) * self.width)
            return
        self.hold(self.part * self.master)
        gradient = self.hold(self.part * self.master)
        self.hold_states(self.part)
        self.memory.release(gradient)

    def update(self, *, first: bool) -> None:
        if not self.offloaded:
            for name in [self.hold(self.part * self.master) for _ in range(1 + self.temporaries)]:
                self.memory.release(name)


class SharedStates(Shared):
    """Stages 1 and 2: weights are whole, in one buffer. Stage 1 reduces after the backward, stage 2 during it."""

    _filled = 0  # number of elements in the bucket
    _own: Hashable | None = None  # this rank's partition of the gradients

    def __init__(self, config: RunConfig, trace: MemoryTrace) -> None:
        self._waiting: dict[int, Hashable] = {}  # gradients that are to be reduced after the backward, by parameter
        super().__init__(config, trace)

    def prepare(self) -> None:
        self.hold(self.part * self.replicas * self.width)
        super().prepare()

    def backward_begins(self) -> None:
        self._bucket = self.hold(self.bucket * self.width)
        self._filled = 0
        self._own = None

    def gradient(self, name: Hashable, parameter: int) -> None:
        if self.stage == 1:
            self._waiting[parameter] = name
        else:
            self._put(name, parameter)

    def backward_ends(self) -> None:
        for parameter in sorted(self._waiting):
            self._put(self._waiting.pop(parameter), parameter)
        self._reduce()
        self.memory.release(self._bucket)

    def update(self, *, first: bool) -> None:
        super().update(first=first)
        if self._own is not None:
            self.memory.release(self._own)

    def _put(self, name: Hashable, parameter: int) -> None:
        """Copy a gradient into the bucket, which is reduced first if there is not enough room."""
        elements = self.trace.parameters[parameter]
        if self._filled + elements > self.bucket:
            self._reduce()
        self._filled += elements
        self.memory.release(name)

    def _reduce(self) -> None:
        if self._filled:
            copied = self.hold(self._filled * self.width)
            if self._own is None and not self.offloaded:
                self._own = self.hold(self.part * self.width)
            self.memory.release(copied)
        self._filled = 0


class SharedWeights(Shared):
    """Stage 3: weights are gathered for a layer's forward and backward.

    Those of the next layers are gathered ahead of time, and weights that are used again soon are kept.
    """

    _filled = 0  # number of elements in the bucket
    _place = 0  # index of the current layer in the order of forwards and backwards
    _left: dict[int, int]  # layer -> number of its parameters that have no gradient yet

    def prepare(self) -> None:
        self.hold(self.part * self.width)
        super().prepare()
        if not self.offloaded:
            self.hold(self.part * self.width)  # the partition of the gradients
        self.hold_bucket()
        sizes: dict[int, int] = {}
        for elements, layer in zip(self.trace.parameters, self.trace.layers, strict=True):
            sizes[layer] = sizes.get(layer, 0) + elements
        self._sizes = sizes
        forward = sorted(sizes)
        self._order = [*forward, *reversed(forward)]
        self._gathered: dict[int, Hashable] = {}
        self._begin()

    def hold_bucket(self) -> None:
        """Allocate the bucket in which gradients are collected; it is permanent."""
        self.hold(self.bucket * self.width)

    def layer_done(self, layer: int) -> None:
        if layer in self._sizes:
            self._move()

    def gradient(self, name: Hashable, parameter: int) -> None:
        elements, layer = self.trace.parameters[parameter], self.trace.layers[parameter]
        if self._filled and self._filled + elements > self.bucket:
            self.pass_by(self._filled * self.width)
            self._filled = 0
        self._filled += elements
        self.memory.release(name)
        self._left[layer] -= 1
        if not self._left[layer]:
            self._move()

    def backward_ends(self) -> None:
        if self._filled:
            self.pass_by(self._filled * self.width)
        for name in self._gathered.values():
            self.memory.release(name)
        self._gathered.clear()

    def update(self, *, first: bool) -> None:
        super().update(first=first)
        self._begin()

    def _begin(self) -> None:
        self._filled = self._place = 0
        self._left = {layer: self.trace.layers.count(layer) for layer in self._sizes}
        self._gather()

    def _move(self) -> None:
        """Go to the next layer: drop the weights of the current one unless they are used again soon, and gather."""
        done = self._order[self._place]
        self._place += 1
        coming = self._order[self._place :]
        totals = itertools.accumulate(self._sizes[layer] for layer in coming)
        soon = {layer for layer, total in zip(coming, totals, strict=True) if total <= MOST_GATHERED}
        if done not in soon:
            self.memory.release(self._gathered.pop(done))
        self._gather()

    def _gather(self) -> None:
        """Gather the weights of the next layer and, ahead of their use, those of layers after it."""
        ahead = 0
        for place, layer in enumerate(self._order[self._place :]):
            if ahead >= MOST_PREFETCHED:
                break
            if layer not in self._gathered:
                self._gathered[layer] = self.hold(self._sizes[layer] * self.width)
                ahead += self._sizes[layer] if place else 0
