"""How the gradient of an operator's weight follows from the gradient of its output, for the operators where it is dear.

Each formula calls what torch's own backward of the operator calls, with the same operands in the same layout, so that
its result has the same bits. What is saved is read from the autograd node (its ``_saved_*`` attributes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["WEIGHT_OPERANDS", "Formula"]

Formula: TypeAlias = Callable[[Tensor], Tensor]
"""From the gradient of the operator's output to that of one operand."""


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that the node saved, without its history; None where hooks stand before it."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    tensor: Tensor = getattr(node, f"_saved_{name}").detach()
    return None if tensor.is_complex() else tensor


def _is_column_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """The layout of a transposed weight: its gradient is made in the same one."""
    return strides[0] == 1 and strides[1] == sizes[0]


def _left_of_mm(name: str, other: str) -> Callable[[Any], Formula | None]:
    """Of ``left @ right`` with matrices: ``G rightᵀ``."""

    def make(node: Any) -> Formula | None:
        right = _saved(node, other)
        if right is None or _is_scaled(node):
            return None
        if _is_column_major(getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")):
            return lambda gradient: right.mm(gradient.t()).t()
        return lambda gradient: gradient.mm(right.t())

    return make


def _right_of_mm(name: str, other: str) -> Callable[[Any], Formula | None]:
    """Of ``left @ right`` with matrices: ``leftᵀ G``."""

    def make(node: Any) -> Formula | None:
        left = _saved(node, other)
        if left is None or _is_scaled(node):
            return None
        if _is_column_major(getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")):
            return lambda gradient: gradient.t().mm(left).t()
        return lambda gradient: left.t().mm(gradient)

    return make


def _is_scaled(node: Any) -> bool:
    """``addmm(..., alpha=a)``: left to autograd."""
    return bool(getattr(node, "_saved_alpha", 1) != 1)


def _left_of_bmm(node: Any) -> Formula | None:
    right = _saved(node, "mat2")
    return None if right is None else lambda gradient: gradient.bmm(right.transpose(1, 2))


def _right_of_bmm(node: Any) -> Formula | None:
    left = _saved(node, "self")
    return None if left is None else lambda gradient: left.transpose(1, 2).bmm(gradient)


def _weight_of_convolution(node: Any) -> Formula | None:
    value, weight = _saved(node, "input"), _saved(node, "weight")
    if value is None or weight is None:
        return None
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [node._saved_bias_sym_sizes_opt, *(getattr(node, f"_saved_{name}") for name in names)]

    def formula(gradient: Tensor) -> Tensor:
        wanted = [False, True, False]  # of input, weight and bias
        made: Tensor = torch.ops.aten.convolution_backward(gradient, value, weight, *options, wanted)[1]
        return made

    return formula


def _weight_of_embedding(node: Any) -> Formula | None:
    indices = _saved(node, "indices")
    if indices is None or node._saved_sparse:
        return None
    rows, padding = node._saved_weight_sym_argsize_0, _signed(node._saved_padding_idx)
    by_frequency = node._saved_scale_grad_by_freq

    def formula(gradient: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten.embedding_backward(gradient, indices, rows, padding, by_frequency, False)
        return made

    return formula


def _signed(value: int) -> int:
    """Nodes show "no padding", -1, as an unsigned number."""
    return value - (1 << 64) if value >= 1 << 63 else value


WEIGHT_OPERANDS: Mapping[str, Mapping[int, Callable[[Any], Formula | None]]] = {
    "AddmmBackward0": {1: _left_of_mm("mat1", "mat2"), 2: _right_of_mm("mat2", "mat1")},
    "MmBackward0": {0: _left_of_mm("self", "mat2"), 1: _right_of_mm("mat2", "self")},
    "BmmBackward0": {0: _left_of_bmm, 1: _right_of_bmm},
    "ConvolutionBackward0": {1: _weight_of_convolution},
    "EmbeddingBackward0": {0: _weight_of_embedding},
}
"""Autograd node → operand → what reads its formula off the node: the products, whose cost is that of a forward.

What reads it returns None where only autograd may compute it: what was saved is behind hooks (a region of activation
checkpointing, or saved tensors that are moved elsewhere) and can be asked for only once.
"""
