"""Operators with the checks that torch's functions make before them, of which a trace keeps nothing.

torch takes the sizes 0 and 1 for constants where it traces, and every other size for one that is neither. A batch norm
of one value per channel, which torch refuses, would pass: it gives zeros, and a running variance that is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHECKED"]

_BATCH_NORM = torch.ops.aten.batch_norm.default
_TRAINING = 5  # the place of the argument


def _batch_norm(value: Tensor, *args: Any) -> Any:
    if args[_TRAINING - 1] and value.numel() == value.shape[1]:
        shape = tuple(value.shape)
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")
    return _BATCH_NORM(value, *args)


CHECKED: dict[Any, Callable[..., Any]] = {_BATCH_NORM: _batch_norm}
"""What a traced model calls in place of an operator."""
