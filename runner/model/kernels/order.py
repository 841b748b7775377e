"""The order in which the axes of a tensor lie in memory, the one with the largest steps first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["in_order", "order_in_memory"]


def order_in_memory(strides: Sequence[int]) -> tuple[int, ...]:
    """The axes by their strides, the largest first; those of equal strides as they stand."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its axes in this order in memory, without gaps."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(tuple(order)).contiguous().permute(back)
