"""Dropout as CUDA computes it, on tensors of any device: one byte per element is saved for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["FusedDropout"]


class FusedDropout(TorchFunctionMode):
    """While active, dropout saves a mask of bytes, as on CUDA; on a CPU it would save noise as wide as its input.

    Source: aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout or func is torch.dropout:
            return _fused(func, *args, **kwargs)
        return func(*args, **kwargs)


def _fused(func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **more: Any) -> Any:
    if inplace or more or not training or not 0 < p < 1:
        return func(input, p, training, **more) if not inplace else func(input, p, training, inplace, **more)
    return torch.native_dropout(input, p, training)[0]
