"""Measures a rank's peak memory: that of the allocator on CUDA, exact tensor bytes on the CPU.

On the CPU, the first steps run under the live tracker, which slows them down, so they are not timed. Layers that are to
be compiled run without compilation in these steps, as the plan predicts memory without the compiler's savings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from runner.engine.engine import Engine
from runner.engine.window import StepBatch
from runner.memory.apply.weight_swap import is_at_home
from runner.model.boundary import flatten
from runner.model.dense_parts import dense_parts
from runner.model.live_tracker import LiveTracker

__all__ = ["TRACKED_STEPS", "MemoryMeter"]

TRACKED_STEPS = 2
"""Number of tracked steps; this is enough, as from the second step on the optimizer's states exist at the start."""


_MOST_TRACKED_STEPS = 32


class MemoryMeter:
    """Measures one engine; :meth:`step` wraps each of its steps.

    Args:
        engine: the engine; its weights, buffers and gradients exist from the start.
        held: further tensors that exist from the start.
    """

    def __init__(self, engine: Engine, held: Iterable[torch.Tensor] = ()) -> None:
        self._cuda = engine.transport.device.type == "cuda"
        self._device = engine.transport.device
        self._compiled = engine.options.compile
        self._tracker = LiveTracker()
        self._steps = 0
        self._to_track = TRACKED_STEPS + engine.options.post_validation  # copies of states come one step later
        if engine.interval > 1:  # each step of the interval, with all states
            self._to_track = min(_MOST_TRACKED_STEPS, engine.interval + 1)
        self._to_track += 2 * engine.overlap  # until the pipeline is full and all versions of the weights exist
        self._engine = engine
        self._peak_before = 0  # before layers have moved
        self._untimed = set(range(0 if self._cuda else self._to_track))
        self._copies = 0
        self._static = _static_bytes(engine, held)
        self._at_home = engine.swap.parameters if engine.swap is not None else []
        self.watch(tensor for store in engine.stores.values() for tensor in store.held)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def skipped(self) -> None:
        """Measure one more step, because the last one was skipped and so created no optimizer state."""
        if self._steps <= self._to_track < _MOST_TRACKED_STEPS:
            self._untimed |= set() if self._cuda else {self._to_track}
            self._to_track += 1

    def hold_copies(self, num_bytes: int) -> None:
        """Count copies from which a checkpoint is written in the background: the most that there have been."""
        self._copies = max(self._copies, num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count tensors that exist since before the first step, such as averages of the weights."""
        self._static += num_bytes

    @property
    def kind(self) -> str:
        """The name of the measurement in the record."""
        return "cuda_allocated" if self._cuda else "tensor_bytes"

    def untimed_steps(self, count: int) -> list[int]:
        """Those of the first ``count`` steps whose times are not valid: bytes are counted, or layers have moved."""
        return sorted(step for step in self._untimed if step < count)

    def layers_moved(self, num_bytes: int) -> None:
        """Measure the next step anew, because the engine has other layers from now on; its time is not valid.

        Args:
            num_bytes: what the rank has held during the move.
        """
        self._peak_before = max(self.peak_bytes, 0 if self._cuda else num_bytes + self._copies)
        self._tracker = LiveTracker()
        self._static = _static_bytes(self._engine, ())
        self._to_track = max(self._to_track, self._steps + 1)
        self._untimed.add(self._steps)

    @property
    def will_track(self) -> bool:
        """Whether the next step is tracked tensor by tensor."""
        return not self._cuda and self._steps < self._to_track

    @property
    def peak_bytes(self) -> int:
        """The peak so far, of weights, buffers, gradients, states, activations, messages and the step's batch."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device)
        return max(self._peak_before, self._static + self._copies + self._tracker.peak)

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator of a CUDA device has reserved so far, with what it cannot reuse; else None."""
        return torch.cuda.max_memory_reserved(self._device) if self._cuda else None

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist before the first step, e.g. restored optimizer states."""
        if not self._cuda:
            for tensor in tensors:
                self._tracker.watch(tensor)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as the host's, e.g. restored optimizer states of weights that are at home there."""
        if not self._cuda:
            self._tracker.leave_out(tensors)

    @contextlib.contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        self._steps += 1
        if self._cuda or self._steps > self._to_track:
            yield
            return
        for tensor in (*flatten(batch.inputs)[0], *flatten(batch.targets)[0]):
            self._tracker.watch(tensor)
        self._tracker.leave_out(each for own in self._at_home for each in (own.data, own.grad) if each is not None)
        with self._tracker, _not_compiled() if self._compiled else contextlib.nullcontext():
            yield


def _not_compiled() -> contextlib.AbstractContextManager[None]:
    """Run compiled layers without compilation. A dispatch mode would do so too, but then also in all later steps."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _static_bytes(engine: Engine, more: Iterable[torch.Tensor]) -> int:
    """Bytes of parameters, buffers and flat gradients, which are alive from before the first step to the end."""
    own = [tensor for module in engine.stages.values() for tensor in (*module.parameters(), *module.buffers())]
    held = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in dense_parts((*own, *more))
        if not is_at_home(t)
    }
    gradients = sum(each.num_bytes - each.num_bytes_at_home for each in engine.all_gradients)
    return sum(held.values()) + gradients
