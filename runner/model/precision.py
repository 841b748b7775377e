"""The dtype of a run, and the conversion of modules and values to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from runner.config.precision import PRECISIONS
from runner.model.boundary import map_tensors

__all__ = ["autocast_of", "autocasting", "cast_module", "dtype_of", "to_precision"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``module.to(dtype)`` that also works for fake parameters; torch's own swaps tensors, which fails for them."""
    replaced: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype is not dtype:
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                owner._parameters[name] = replaced[id(parameter)]
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
