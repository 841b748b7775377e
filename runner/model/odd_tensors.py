"""Weights and buffers that are not dense, real and with elements: which of them a run keeps as they are, and which not.

Kept exactly: complex tensors, whole numbers, truth values, other floating-point formats, buffers that are sparse, have
no elements or no axis, are not contiguous or overlap themselves. Refused by name: what has no size yet, what is no
ordinary tensor, sparse weights, and memory that two names would change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.errors import Problem
from runner.model.buffers import overlaps
from runner.model.dense_parts import SPARSE_LAYOUTS

__all__ = ["NamedModule", "made_ready", "odd_problems"]


class NamedModule(Protocol):
    """A layer; see :class:`runner.model.layers.LayerSource`."""

    @property
    def given(self) -> nn.Module | None: ...

    def full_name(self, local_name: str) -> str: ...


def made_ready(module: nn.Module) -> nn.Module:
    """``module``, whose weights without elements need no gradient: there is nothing in them to train."""
    for parameter in module.parameters():
        if not is_lazy(parameter) and not parameter.numel():
            parameter.requires_grad_(False)  # noqa: FBT003  # torch's name for it
    return module


def odd_problems(layers: Sequence[NamedModule], target: str) -> list[Problem]:
    """Why weights and buffers of layers that are made already cannot be trained as they are.

    Args:
        layers: the layers of a model; those that are made later are left out.
        target: the model's function, for the messages.
    """
    given = [(layer, layer.given) for layer in layers if layer.given is not None]
    found = [problem for layer, module in given for problem in _of_module(layer, module, target)]
    return list({problem.rule: problem for problem in found or _over_weights(given, target)}.values())


def _of_module(layer: NamedModule, module: nn.Module, target: str) -> Iterator[Problem]:
    for path, owner in module.named_modules():
        every = itertools.chain(
            owner._parameters.items(), owner._buffers.items()
        )  # of a ScriptModule they are no dicts
        held = {name: value for name, value in every if value is not None}
        for name, value in held.items():
            persistent = name in owner._buffers and name not in owner._non_persistent_buffers_set
            shown = layer.full_name(f"{path}.{name}" if path else name)
            told = _reason(value, is_parameter=name in owner._parameters, persistent=persistent)
            if told is not None:
                rule, why, fix = told
                yield Problem("model.target", target, f"{shown} {rule}", why, fix)


def _reason(value: Tensor, *, is_parameter: bool, persistent: bool) -> tuple[str, str, str] | None:
    """``(rule, why, fix)`` of a tensor that cannot be kept, or None."""
    if is_lazy(value):
        why = "Its size comes with the first forward, and memory, optimizer and ranks are planned before"
        return "must have a size", why, "one call of the model with a batch in its function"
    if value.is_meta:
        why = "It is on the device meta, and nobody would give it values"
        return "must have values", why, "its layer made on a device that has memory"
    kind = _wrapped_kind(value)
    if kind is not None:
        why = f"It is a {kind} tensor, which has no plain memory to copy, send and save"
        return "must be an ordinary tensor", why, "its parts as ordinary buffers"
    if value.layout in SPARSE_LAYOUTS and is_parameter:
        why = "Its gradient would have other places than it has itself; a sparse buffer beside dense values is kept"
        return "must be dense", why, "a dense parameter"
    if value.layout in SPARSE_LAYOUTS and persistent:
        why = "It is sparse, and files of weights (safetensors) hold dense tensors alone"
        return "must be registered with persistent=False", why, "register_buffer(name, tensor, persistent=False)"
    if is_parameter and value.requires_grad and overlaps(value):
        why = f"Its {value.numel()} elements share the memory of fewer, so that no optimizer can update them"
        return "must have memory for each element", why, "the parameter made by .contiguous()"
    return None


def _wrapped_kind(value: Tensor) -> str | None:
    """What a tensor is that has no plain memory, in a word; None for an ordinary or a sparse one."""
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "MKL-DNN": value.is_mkldnn}
    wraps: bool = is_traceable_wrapper_subclass(value)
    return next((name for name, is_it in kinds.items() if is_it), type(value).__name__ if wraps else None)


def _over_weights(given: Iterable[tuple[NamedModule, nn.Module]], target: str) -> Iterator[Problem]:
    """A problem for every buffer over the memory of a trained weight, which moves where it is converted."""
    layers = list(given)
    weights = {
        parameter.untyped_storage()._cdata: layer.full_name(name)
        for layer, module in layers
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for layer, module in layers:
        for name, buffer in module.named_buffers():
            weight = weights.get(_memory(buffer)) if buffer.numel() else None
            if weight is not None:
                rule = f"{layer.full_name(name)} must have memory of its own"
                why = f"It is a buffer over the memory of {weight}, which is trained and may be moved"
                yield Problem("model.target", target, rule, why, "the weight itself in the forward")


def _memory(tensor: Tensor) -> int:
    """What tensors over the same memory have in common; sparse tensors have memory of their own."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
