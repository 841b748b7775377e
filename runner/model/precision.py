"""The dtype of a run, and the conversion of modules and values to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from runner.config.precision import PRECISIONS
from runner.model.boundary import map_tensors

__all__ = ["autocast_of", "autocasting", "cast_module", "dtype_of", "for_loss", "to_precision"]

Converted = TypeVar("Converted", bound=nn.Module)

_AS_MADE = torch.float32
"""The format that converts no module."""

_instead_of = WeakIdKeyDictionary()
"""For fake parameters: by format, what has taken their place."""

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of weights and gradients and, without autocast, of activations."""
    return _DTYPES[PRECISIONS[precision].weights]


def autocast_of(precision: str) -> torch.dtype | None:
    """The dtype to which matrix products of forwards are cast; None if it is the dtype of the weights."""
    autocast = PRECISIONS[precision].autocast
    return _DTYPES[autocast] if autocast is not None else None


def to_precision(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in ``value`` to ``dtype``; others are unchanged."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)


def for_loss(value: Any) -> Any:
    """Convert the floating-point tensors of an output that have fewer bits to fp32, in which losses are computed."""
    return map_tensors(
        lambda t: t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t, value
    )


def cast_module(module: Converted, dtype: torch.dtype) -> Converted:
    """Convert the weights and buffers of ``module`` to the format of a run; every user of a model converts it here.

    In float32, in which modules are made, everything stays what it was made: a buffer of float64 or float16, too. Into
    another format go real floating-point tensors. Complex numbers, of which ``module.to(dtype)`` would drop the
    imaginary parts, stay in every format, and so do whole numbers and truth values.

    Returns:
        ``module``. Its parameters are the same objects as before, but for fake ones, for which torch has no such way;
        a fake parameter of several modules becomes one other parameter in all of them.
    """
    if dtype is _AS_MADE:
        return module
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype is dtype:
                continue
            if not isinstance(parameter, FakeTensor):
                parameter.data = parameter.data.to(dtype)
                continue
            made = _instead_of.setdefault(parameter, {})  # type: ignore[no-untyped-call]
            if dtype not in made:
                made[dtype] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            owner._parameters[name] = made[dtype]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(dtype)
    return module


def autocasting(function: Callable[[Any], Any], device_type: str, autocast: torch.dtype | None) -> Callable[[Any], Any]:
    """A layer's forward under autocast, as the engine runs it."""

    def forward(value: Any) -> Any:
        with torch.autocast(device_type, autocast, enabled=autocast is not None):
            return function(value)

    return forward
