"""What every layout must equal: a plain PyTorch loop, which imports nothing of the runner.

It accumulates Σ loss sums over the micro-batches of a step in order, divides once by Σ weights, clips by the exact
norm, and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Stepper(Protocol):
    """What updates weights from their gradients: an optimizer, or one written out by hand."""

    def step(self) -> object: ...


def microbatches(batch: Tensor, replicas: int, count: int) -> list[Tensor]:
    """A step's micro-batches in global order: replica by replica.

    Each replica's samples have memory of their own, as where it loads them: kernels round by its alignment.
    """
    return [part for replica in batch.tensor_split(replicas) for part in replica.clone().tensor_split(count)]


def loss_and_weight(loss: Callable[..., Any], output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    made = loss(output, target)
    if isinstance(made, tuple):
        return made[0], float(made[1])
    return made * len(output), float(len(output))


def clip(parameters: Sequence[Tensor], most: float) -> None:
    norm = math.sqrt(math.fsum(float(p.grad.double().pow(2).sum()) for p in parameters if p.grad is not None))
    factor = min(1.0, most / (norm + 1e-6))
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def in_fp32(output: Any) -> Any:
    """A model's output (a tensor or a tuple of them) as the loss gets it."""
    return tuple(map(in_fp32, output)) if isinstance(output, tuple) else output.float()


def accumulate(
    model: nn.Module, loss: Callable[..., Any], pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> tuple[float, float, list[Tensor | None]]:
    """``(loss sum, weight, gradients)`` over some micro-batches in order."""
    model.zero_grad()
    total, weight = 0.0, 0.0
    for x, y in pairs:
        if not len(x):
            continue
        if x.is_floating_point():
            x = x.to(dtype)
        part, part_weight = loss_and_weight(loss, in_fp32(model(x)), y)
        part.backward()  # type: ignore[no-untyped-call]  # the library's
        total += float(part.detach().double())
        weight += part_weight
    return total, weight, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(
    model: nn.Module,
    loss: Callable[..., Any],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    replicas: int = 1,
    count: int = 1,
    clip_norm: float | None = None,
    optimizer: Callable[[Sequence[Tensor]], Stepper],
    dtype: torch.dtype = torch.float32,
    by_replica: bool = False,
    pipelines: int = 1,
    joined: int = 1,
) -> list[float]:
    """Train ``model`` in place; the mean loss of every step.

    With ``by_replica`` gradients and losses are summed within each replica first, then over replicas: the order in
    which replicas sum, so that they must agree bitwise. With ``pipelines`` every such micro-batch of one replica is
    summed with its like first: those of each direction, where micro-batches go through the ranks in several ways;
    ``joined`` neighbours go the same way.
    """
    model.to(dtype)
    parameters = list(model.parameters())
    stepper = optimizer(parameters)
    losses = []
    for inputs, targets in batches:
        pairs = list(zip(microbatches(inputs, replicas, count), microbatches(targets, replicas, count), strict=True))
        groups = [pairs[d * count : (d + 1) * count] for d in range(replicas)] if by_replica else [pairs]
        groups = [
            [pair for number, pair in enumerate(group) if number // joined % pipelines == way]
            for group in groups
            for way in range(pipelines)
        ]
        sums = [accumulate(model, loss, group, dtype) for group in groups]
        total, weight = sum(part[0] for part in sums), sum(part[1] for part in sums)
        for index, parameter in enumerate(parameters):
            gradients = [each for part in sums if (each := part[2][index]) is not None]
            parameter.grad = sum(gradients[1:], gradients[0]) if gradients else None
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        if clip_norm is not None:
            clip(parameters, clip_norm)
        stepper.step()
        losses.append(total / weight)
    return losses
