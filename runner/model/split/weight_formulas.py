"""Formulas for the gradient of an operator's weight from that of its output, for operators where it is expensive.

Each formula calls the same functions as torch's own backward of the operator, with the same operands in the same
layout, so that its result has the same bits. Saved tensors are read from the autograd node (``_saved_*`` attributes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runner.model.split.graph import unpacks_once

__all__ = ["FACTORS", "Formula", "formulas_of"]

Formula: TypeAlias = Callable[[Tensor], Tensor]
"""A function from the gradient of the operator's output to the gradient of one operand."""


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that the node saved, without its history; None if it is behind hooks."""
    if unpacks_once(getattr(node, f"_raw_saved_{name}")):
        return None
    tensor: Tensor = getattr(node, f"_saved_{name}").detach()
    return None if tensor.is_complex() else tensor


def _is_column_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a weight has the layout of a transposed matrix; its gradient is then made in the same layout."""
    return strides[0] == 1 and strides[1] == sizes[0]


def _left_of_mm(name: str, other: str) -> Callable[[Any], Formula | None]:
    """The formula for the left operand of ``left @ right`` with matrices: ``G rightᵀ``."""

    def make(node: Any) -> Formula | None:
        right = _saved(node, other)
        if right is None or _is_scaled(node):
            return None
        if _is_column_major(getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")):
            return lambda gradient: right.mm(gradient.t()).t()
        return lambda gradient: gradient.mm(right.t())

    return make


def _right_of_mm(name: str, other: str) -> Callable[[Any], Formula | None]:
    """The formula for the right operand of ``left @ right`` with matrices: ``leftᵀ G``."""

    def make(node: Any) -> Formula | None:
        left = _saved(node, other)
        if left is None or _is_scaled(node):
            return None
        if _is_column_major(getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")):
            return lambda gradient: gradient.t().mm(left).t()
        return lambda gradient: left.t().mm(gradient)

    return make


def _is_scaled(node: Any) -> bool:
    """Whether the product is ``addmm(..., alpha=a)``, which is left to autograd."""
    return bool(getattr(node, "_saved_alpha", 1) != 1)


def _left_of_bmm(node: Any) -> Formula | None:
    right = _saved(node, "mat2")
    return None if right is None else lambda gradient: gradient.bmm(right.transpose(1, 2))


def _right_of_bmm(node: Any) -> Formula | None:
    left = _saved(node, "self")
    return None if left is None else lambda gradient: left.transpose(1, 2).bmm(gradient)


class _OfConvolution:
    """What makes the gradients of a convolution's weight and bias together.

    Torch does so on a CPU even if it is asked for one of them: a bias whose gradient I made would cost the weight's,
    too.
    """

    def __init__(self, node: Any, value: Tensor, weight: Tensor) -> None:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        self._options = [node._saved_bias_sym_sizes_opt, *(getattr(node, f"_saved_{name}") for name in names)]
        self._saved: tuple[Tensor, Tensor] | None = (value, weight)
        self._wanted = [False, False, False]  # gradients of input, weight, bias
        self._made: list[Tensor | None] = []

    def formula(self, operand: int) -> Formula:
        """The formula for the weight, 1, or the bias, 2."""
        self._wanted[operand] = True

        def make(gradient: Tensor) -> Tensor:
            if self._saved is not None:
                saved, self._saved = self._saved, None
                self._made = list(torch.ops.aten.convolution_backward(gradient, *saved, *self._options, self._wanted))
            made, self._made[operand] = self._made[operand], None
            assert made is not None  # each formula is used once
            return made

        return make


def _of_convolution(node: Any, operands: Collection[int]) -> dict[int, Formula | None]:
    value, weight = _saved(node, "input"), _saved(node, "weight")
    if value is None or weight is None:
        return dict.fromkeys(operands)
    made = _OfConvolution(node, value, weight)
    return {operand: made.formula(operand) for operand in operands}


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
    """Convert an unsigned number of a node to a signed one: nodes store -1, "no padding", as unsigned."""
    return value - (1 << 64) if value >= 1 << 63 else value


_MAKERS: Mapping[str, Mapping[int, Callable[[Any], Formula | None]]] = {
    "AddmmBackward0": {1: _left_of_mm("mat1", "mat2"), 2: _right_of_mm("mat2", "mat1")},
    "MmBackward0": {0: _left_of_mm("self", "mat2"), 1: _right_of_mm("mat2", "self")},
    "BmmBackward0": {0: _left_of_bmm, 1: _right_of_bmm},
    "EmbeddingBackward0": {0: _weight_of_embedding},
}
_CONVOLUTION, _WEIGHT, _BIAS = "ConvolutionBackward0", 1, 2

FACTORS: Mapping[str, Collection[int]] = {_CONVOLUTION: (_WEIGHT,), **_MAKERS}
"""The operands by autograd node. These nodes are the products; a gradient of such an operand costs as much as their
forward."""


def formulas_of(node: Any, factors: Collection[int], able: Collection[int]) -> Mapping[int, Formula | None]:
    """The formulas of a product, by operand.

    None stands for a gradient that only autograd may compute: the saved tensors are behind hooks (a region of
    activation checkpointing, or tensors that ``save_on_cpu`` has moved) and can be unpacked only once.

    Args:
        node: the product.
        factors: its operands whose gradients are wanted.
        able: all operands whose gradients could be made by a formula. What costs nothing beside a factor's is, too.
    """
    name = type(node).__name__
    if name == _CONVOLUTION and factors:
        return _of_convolution(node, [each for each in (_WEIGHT, _BIAS) if each in able])
    return {each: _MAKERS[name][each](node) for each in factors}
