"""Linear layers that keep some rows of their input: the gradient of the weight is estimated from them, without bias.

Forward, gradient of the input and gradient of the bias are exact. With k of N rows drawn without replacement, the
gradient of the weight is N / k times what these rows give; its mean is the exact one. Between the gradient of the
output and the input, S^T S stands in place of the identity: the rows of S choose and scale.

Source: Bershatsky et al. 2022, "Memory-Efficient Backpropagation through Large Linear Layers", with rows for its random
matrices: drawing rows needs no product with S, and has more variance where few rows have most of the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["randomized_linear"]


def randomized_linear(value: Tensor, weight: Tensor, bias: Tensor | None, *, ratio: float, seed: int) -> Tensor:
    """``value @ weight.T + bias`` for [..., inputs] and [outputs, inputs]; keeps ceil(ratio * rows) rows of ``value``.

    Args:
        value: the input.
        weight, bias: the layer's weight and bias.
        ratio: the share of the rows that is kept, above 0 and below 1.
        seed: the seed of the choice.
    """
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        value, weight = value.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    return _RandomizedLinear.apply(value, weight, bias, ratio, seed)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class _RandomizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, ratio: float, seed: int) -> Tensor:
        rows = value.reshape(-1, value.shape[-1])
        ctx.count, ctx.seed = math.ceil(ratio * len(rows)), seed
        kept = rows[_chosen(ctx, rows)] if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)
        return functional.linear(value, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None
        if kept is not None:
            of_weight = rows[_chosen(ctx, rows)].T @ kept * (len(rows) / max(1, ctx.count))
        return (
            gradient @ weight if weight is not None else None,
            of_weight,
            rows.sum(dim=0) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _chosen(ctx: Any, rows: Tensor) -> Tensor:
    """The kept rows, the same in forward and backward."""
    generator = torch.Generator(rows.device).manual_seed(ctx.seed)
    return torch.randperm(len(rows), generator=generator, device=rows.device)[: ctx.count]
