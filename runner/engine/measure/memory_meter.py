"""A rank's peak memory: the allocator's on CUDA, exact tensor bytes on the CPU.

On the CPU the first steps run under the live tracker, which slows them down; they are not timed. Layers that are to be
compiled run as they are written in these steps: measured is what the plan predicts, without the compiler's savings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from runner.engine.engine import Engine
from runner.engine.window import StepBatch
from runner.model.boundary import flatten
from runner.model.live_tracker import LiveTracker

__all__ = ["TRACKED_STEPS", "MemoryMeter"]

TRACKED_STEPS = 2
"""Enough to see the peak: from the second step on, the optimizer's states are there from the start."""


_MOST_TRACKED_STEPS = 32


class MemoryMeter:
    """Measures one engine; :meth:`step` goes around each of its steps.

    Args:
        engine: its weights, buffers and gradients are there from the start.
        held: further tensors that are.
    """

    def __init__(self, engine: Engine, held: Iterable[torch.Tensor] = ()) -> None:
        self._cuda = engine.transport.device.type == "cuda"
        self._device = engine.transport.device
        self._compiled = engine.options.compile
        self._tracker = LiveTracker()
        self._steps = 0
        self._to_track = TRACKED_STEPS + engine.options.post_validation  # the states' copies are a step behind them
        if engine.interval > 1:  # each step of the interval, the first one with all states
            self._to_track = min(_MOST_TRACKED_STEPS, engine.interval + 1)
        self._to_track += 2 * engine.overlap  # until the pipeline is full, and all versions of the weights are there
        self._static = _static_bytes(engine, held)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def skipped(self) -> None:
        """The step just measured updated nothing, and so made no optimizer state: another one has to be measured."""
        if self._steps <= self._to_track < _MOST_TRACKED_STEPS:
            self._to_track += 1

    def hold(self, num_bytes: int) -> None:
        """Count tensors that were made before the first step and stay: averages of the weights."""
        self._static += num_bytes

    @property
    def kind(self) -> str:
        """As the record calls the measurement."""
        return "cuda_allocated" if self._cuda else "tensor_bytes"

    @property
    def untimed_steps(self) -> int:
        """Steps whose times say nothing."""
        return 0 if self._cuda else self._to_track

    @property
    def will_track(self) -> bool:
        """Whether the next step is one that is tracked tensor by tensor."""
        return not self._cuda and self._steps < self._to_track

    @property
    def peak_bytes(self) -> int:
        """The most so far: weights, buffers, gradients, states, activations, messages, the step's batch."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device)
        return self._static + self._tracker.peak

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there before the first step, e.g. restored optimizer states."""
        if not self._cuda:
            for tensor in tensors:
                self._tracker.watch(tensor)

    @contextlib.contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        self._steps += 1
        if self._cuda or self._steps > self._to_track:
            yield
            return
        for tensor in (*flatten(batch.inputs)[0], *flatten(batch.targets)[0]):
            self._tracker.watch(tensor)
        with self._tracker, _not_compiled() if self._compiled else contextlib.nullcontext():
            yield


def _not_compiled() -> contextlib.AbstractContextManager[None]:
    """Compiled layers run as they are written: under a dispatch mode they would, and from then on for ever."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _static_bytes(engine: Engine, more: Iterable[torch.Tensor]) -> int:
    """Parameters, buffers and the flat gradients: alive from before the first step to the end."""
    own = [tensor for module in engine.stages.values() for tensor in (*module.parameters(), *module.buffers())]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*own, *more)}
    return sum(held.values()) + sum(gradients.num_bytes for gradients in engine.all_gradients)
