"""Torch's norms and activations, one simple operator after the other: ``kernels.norm=eager`` and its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["Composites"]


def _layer_norm(
    value: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_: object,
) -> Tensor:  # fmt: skip
    axes = tuple(range(-len(shape), 0))
    centred = value - value.mean(axes, keepdim=True)
    made = centred * torch.rsqrt(centred.pow(2).mean(axes, keepdim=True) + eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def _rms_norm(value: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    least = torch.finfo(value.dtype).eps if eps is None else eps
    made = value * torch.rsqrt(value.pow(2).mean(axes, keepdim=True) + least)
    return made if weight is None else made * weight


def _gelu(value: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * value * (1 + torch.tanh(sqrt(2 / pi) * (value + 0.044715 * value.pow(3))))
    return 0.5 * value * (1 + torch.erf(value / sqrt(2)))


def _silu(value: Tensor, inplace: bool = False) -> Tensor:
    return value * torch.sigmoid(value)


_ATEN = torch.ops.aten
_NORM: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((functional.layer_norm, torch.layer_norm, _ATEN.layer_norm.default), _layer_norm),
    **dict.fromkeys((functional.rms_norm, torch.rms_norm, _ATEN.rms_norm.default), _rms_norm),
}
_ELEMENTWISE: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((functional.gelu, _ATEN.gelu.default), _gelu),
    **dict.fromkeys((functional.silu, _ATEN.silu.default), _silu),
}


class Composites(TorchFunctionMode):
    """Sees the functions of torch that a layer calls.

    Args:
        kinds: ``norm``, ``elementwise``: what is computed operator by operator.
        found: is told what has been.
    """

    def __init__(self, kinds: frozenset[str], found: set[str]) -> None:
        super().__init__()
        self._found = found
        self._own = {
            func: (kind, composite)
            for kind, of_kind in (("norm", _NORM), ("elementwise", _ELEMENTWISE))
            if kind in kinds
            for func, composite in of_kind.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind, composite = self._own.get(func, ("", func))
        if kind and not (kwargs or {}).get("inplace"):
            self._found.add(kind)
            return composite(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
