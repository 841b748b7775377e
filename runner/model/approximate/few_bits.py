"""Activation functions that keep the number of their derivative's level instead of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from runner.model.approximate.tables import step_table
from runner.optim.compression.bits import pack, unpack

__all__ = ["few_bit"]


def few_bit(activation: str, function: Callable[[Tensor], Tensor], value: Tensor, bits: int) -> Tensor:
    """The exact ``function(value)``, whose backward multiplies by the nearest of 2**bits slopes.

    Between forward and backward it keeps ``bits`` bits for each element; relu, one bit and its exact slope.
    """
    return _FewBits.apply(value, activation, function, bits)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class _FewBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, activation: str, function: Callable[[Tensor], Tensor], bits: int) -> Tensor:
        table = step_table(activation, bits)
        borders = value.new_tensor(table.borders)
        ctx.save_for_backward(pack(torch.bucketize(value.detach().flatten(), borders, out_int32=True), table.bits))
        ctx.table = table
        return function(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        numbers = unpack(packed, ctx.table.bits, gradient.numel())
        slopes = gradient.new_tensor(ctx.table.levels)[numbers.int()].view(gradient.shape)
        return gradient * slopes, None, None, None
