"""Records what the forward and backward of one micro-batch through all layers allocate and free, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from runner.config.schema import RunConfig
from runner.model.boundary import num_samples
from runner.model.data import LossFunction, loss_sum
from runner.model.layers import LayerSource
from runner.model.live_tracker import LiveTracker
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, for_loss, to_precision
from runner.profiling.model import faked

__all__ = ["MemoryTrace", "trace_of"]


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """What the forward and backward of one micro-batch allocate and free, in order, as requests to an allocator.

    Args:
        events: ``("+", storage, bytes)`` allocated; ``("-", storage, 0)`` freed; ``("layer", layer, 0)`` the forward of
            the layer has ended; ``("backward", 0, 0)`` the backward begins; ``("gradient", storage, parameter)`` the
            gradient of a parameter is complete, and only the parameter holds it.
        parameters: elements of each trained parameter.
        layers: the layer of each trained parameter.
    """

    events: tuple[tuple[str, int, int], ...]
    parameters: tuple[int, ...]
    layers: tuple[int, ...]


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


def trace_of(config: RunConfig, inputs: Any, targets: Any) -> MemoryTrace:
    """Record what a micro-batch allocates, on fake tensors. Raises any error of the model's code on fake tensors."""
    with faked(config, inputs, targets) as (model, fake_inputs, fake_targets):
        dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
        return _recorded(model.layers, fake_inputs, fake_targets, model.loss, dtype, autocast)


def _recorded(
    sources: Sequence[LayerSource],
    inputs: Any,
    targets: Any,
    loss: LossFunction,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> MemoryTrace:
    """The trace of one micro-batch of fake tensors; all layers are built at once."""
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
