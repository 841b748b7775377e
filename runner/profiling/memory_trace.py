"""Records what the forward and backward of one micro-batch through all layers allocate and free, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from runner.model.boundary import num_samples
from runner.model.data import LossFunction, loss_sum
from runner.model.layers import LayerSource
from runner.model.live_tracker import LiveTracker
from runner.model.precision import autocasting, cast_module, for_loss, to_precision
from runner.profile import MemoryTrace

__all__ = ["trace_memory"]


class _Recorder(LiveTracker):  # type: ignore[no-untyped-call]
    """A tracker that records every allocation and release."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int, int]] = []
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @override
    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        super().watch(tensor)
        number = self._numbers[storage] = len(self.events)
        self.events.append(("+", number, storage.nbytes()))
        weakref.finalize(storage, self._note, "-", number)

    def _note(self, kind: str, number: int, value: int = 0) -> None:
        self.events.append((kind, number, value))

    def mark(self, kind: str, number: int = 0) -> None:
        self._note(kind, number)

    def gradient(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook for the parameter with this index."""

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._note("gradient", self._numbers[parameter.grad.untyped_storage()], index)

        return hook


def trace_memory(
    sources: Sequence[LayerSource],
    inputs: Any,
    targets: Any,
    loss: LossFunction,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
) -> MemoryTrace:
    """Record one micro-batch of fake tensors; all layers are built at once.

    Args:
        sources, inputs, targets, loss, dtype, autocast: see :func:`runner.profiling.model.profile_layers`.
    """
    modules = [cast_module(source.build(), dtype) for source in sources]
    owned = _trained(modules)
    recorder = _Recorder()
    for index, (_, parameter) in enumerate(owned):
        parameter.register_post_accumulate_grad_hook(recorder.gradient(index))  # type: ignore[no-untyped-call]
    value = to_precision((inputs, targets) if sources[0].step is not None else inputs, dtype)
    with recorder:
        for number, (source, module) in enumerate(zip(sources, modules, strict=True)):
            value = autocasting(source.calling(module), "cpu", autocast)(value)
            recorder.mark("layer", number)
        total = loss_sum(loss(for_loss(value), targets), num_samples(inputs))[0]
        del value
        recorder.mark("backward")
        torch.autograd.backward(total)
        del total
    events = tuple(recorder.events)  # what is freed after this belongs to the end of the recording, not to the step
    return MemoryTrace(events, tuple(p.numel() for _, p in owned), tuple(layer for layer, _ in owned))


def _trained(modules: Sequence[nn.Module]) -> list[tuple[int, nn.Parameter]]:
    """Each trained parameter once, with the first layer that has it."""
    found: dict[nn.Parameter, int] = {}
    for layer, module in enumerate(modules):
        for parameter in module.parameters():
            if parameter.requires_grad:
                found.setdefault(parameter, layer)
    return [(layer, parameter) for parameter, layer in found.items()]
