"""Linear maps computed with numbers of four bits, emulated in the usual formats: INT4 forward, radix-4 FP4 backward.

Inputs and weights are rounded to 15 levels of their tensor's largest magnitude. Gradients of the output are rounded to
zero and seven powers of four, with a sign. The two products of a backward use two grids, 4^k and 2 * 4^k (two-phase
rounding), so that they do not share their errors. A scale for each call (GradScale) brings the largest gradient below
the end of the grid. Rounding of gradients is random, so that its mean is the gradient.

Source: Sun et al. 2020, "Ultra-Low Precision 4-bit Training of Deep Neural Networks", from memory. Here the scale
follows from each tensor where the source adapts one per layer over steps; levels of weights follow from their largest
magnitude (source: SAWB), and the first and the last layer are no exceptions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["EVEN", "LARGEST", "ODD", "four_bit_linear", "grad_scale", "rounded", "to_levels"]

_LEVELS = 7
_POWERS = 7
EVEN, ODD = 1.0, 2.0
"""The smallest magnitude above zero of each of the two grids."""
LARGEST = EVEN * 4.0 ** (_POWERS - 1)
"""The largest magnitude of the smaller grid; scaled gradients are below it."""
_TOP = 2 * (_POWERS - 1)  # its power of two
_MOST = 100


def to_levels(value: Tensor) -> Tensor:
    """Round to multiples of the largest magnitude / 7: sixteen numbers but one."""
    step = value.abs().amax().clamp(min=torch.finfo(value.dtype).tiny) / _LEVELS
    return (value / step).round_() * step


def grad_scale(gradient: Tensor) -> Tensor:
    """The power of two that brings the largest magnitude to :data:`LARGEST` / 2 at least, and below :data:`LARGEST`."""
    exponent = torch.frexp(gradient.abs().amax()).exponent
    return torch.ldexp(gradient.new_ones(()), _TOP - exponent.clamp(min=-_MOST, max=_MOST))


def rounded(value: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """Round each element at random to one of its two neighbours among 0 and ± smallest * 4^k, k = 0 .. 6.

    The mean of the result is the element, unless it is beyond the end of the grid, to which it is then cut. What is
    not finite stays so.
    """
    grid = value.new_tensor([0.0, *(smallest * 4.0**power for power in range(_POWERS))])
    magnitude = value.abs().clamp(max=smallest * 4.0 ** (_POWERS - 1))
    above = torch.bucketize(magnitude, grid).clamp(min=1, max=_POWERS)
    low, high = grid[above - 1], grid[above]
    dice = torch.rand(value.shape, generator=generator, device=value.device, dtype=value.dtype)
    chosen = torch.where(dice * (high - low) < magnitude - low, high, low)
    return torch.where(value.isfinite(), chosen * value.sign(), value)


def four_bit_linear(value: Tensor, weight: Tensor, bias: Tensor | None, *, seed: int) -> Tensor:
    """``value @ weight.T + bias`` for [..., inputs] and [outputs, inputs], with both rounded to levels.

    Args:
        value: the input.
        weight, bias: the layer's weight and bias.
        seed: the seed of the rounding in the backward.
    """
    return _FourBits.apply(value, weight, bias, seed)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class _FourBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, seed: int) -> Tensor:
        few, few_weights = to_levels(value), to_levels(weight)
        ctx.save_for_backward(few, few_weights)
        ctx.seed = seed
        return functional.linear(few, few_weights, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        generator = torch.Generator(gradient.device).manual_seed(ctx.seed)
        scale = grad_scale(gradient)
        scaled = gradient * scale
        of_value = of_weight = None
        if ctx.needs_input_grad[0]:
            of_value = rounded(scaled, EVEN, generator) @ weight / scale
        if ctx.needs_input_grad[1]:
            rows = rounded(scaled, ODD, generator).reshape(-1, gradient.shape[-1])
            of_weight = rows.T @ value.reshape(-1, value.shape[-1]) / scale
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_value, of_weight, of_bias, None
