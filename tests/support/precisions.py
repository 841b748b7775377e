"""The plain loop in every precision, by hand, as torch's recipes and the papers describe it.

Imports nothing of the runner. Batches may be tensors, tuples or dicts of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Plain:
    """How a precision computes.

    Args:
        weights: dtype of the model.
        autocast: dtype of its matrix products, if another.
        masters: the optimizer updates fp32 copies.
        scaled: the loss is scaled; see ``scales`` of :func:`train`.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    masters: bool = False
    scaled: bool = False


PLAIN = {
    "fp32": Plain(),
    "bf16": Plain(torch.bfloat16),
    "bf16_master": Plain(torch.bfloat16, masters=True),
    "bf16_mixed": Plain(autocast=torch.bfloat16),
    "fp16": Plain(torch.float16, masters=True, scaled=True),
    "fp16_mixed": Plain(autocast=torch.float16, scaled=True),
}


def parts(batch: tuple[Any, Tensor], count: int) -> list[tuple[Any, Tensor]]:
    """The micro-batches of ``(inputs, targets)``, without the empty ones' samples."""
    inputs, targets = batch
    cut = tree_map(lambda tensor: tensor.tensor_split(count), inputs)
    chosen = [tree_map(lambda pieces, k=k: pieces[k], cut, is_leaf=_is_pieces) for k in range(count)]
    return list(zip(chosen, targets.tensor_split(count), strict=True))


def _is_pieces(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, Tensor) for each in value)


def loss_of(plain: Plain, model: nn.Module, loss: Callable[..., Any], value: Any, target: Tensor) -> Tensor:
    """The sum over a micro-batch's samples of what ``loss`` means over, in fp32."""
    value = tree_map(lambda t: t.to(plain.weights) if t.is_floating_point() else t, value)
    with torch.autocast("cpu", plain.autocast, enabled=plain.autocast is not None):
        if isinstance(value, dict):
            output = model(**value)
        else:
            output = model(*value) if isinstance(value, tuple) else model(value)
    output = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, output)
    made: Tensor = loss(output, target) * len(target)
    return made


def train(
    plain: Plain,
    model: nn.Module,
    loss: Callable[..., Any],
    batches: Sequence[tuple[Any, Tensor]],
    *,
    count: int,
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    seed: Callable[[int, int], object] = lambda step, microbatch: None,
    scales: Sequence[float] = (),
    clip_value: float | None = None,
    clip_norm: float | None = None,
) -> list[float]:
    """Train ``model`` in place; the mean loss of every step.

    Args:
        seed: called with step and micro-batch before each forward: what dropout is keyed by.
        scales: of the loss per sample in every step, powers of two; the sum is scaled by ``scale / samples``.
    """
    model.to(plain.weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updated = [nn.Parameter(p.detach().float().clone()) for p in trained] if plain.masters else trained
    stepper, losses = optimizer(updated), []
    for step, batch in enumerate(batches):
        model.zero_grad(set_to_none=False)
        factor = scales[step] / 2 ** (len(batch[1]).bit_length() - 1) if plain.scaled else 1.0
        total = weight = 0.0
        for number, (value, target) in enumerate(parts(batch, count)):
            if not len(target):
                continue
            seed(step, number)
            part = loss_of(plain, model, loss, value, target)
            (part * factor if plain.scaled else part).backward()  # type: ignore[no-untyped-call]  # the library's
            total += float(part.detach().double())
            weight += len(target)
        _update(plain, trained, updated, stepper, weight * factor, clip_value, clip_norm)
        losses.append(total / weight)
    return losses


def _update(
    plain: Plain,
    trained: list[nn.Parameter],
    updated: list[nn.Parameter],
    stepper: torch.optim.Optimizer,
    divisor: float,
    clip_value: float | None,
    clip_norm: float | None,
) -> None:
    for parameter, master in zip(trained, updated, strict=True):
        if parameter.grad is None:
            continue
        master.grad = (parameter.grad.float() if plain.masters else parameter.grad) / divisor
        if clip_value is not None:
            master.grad.clamp_(-clip_value, clip_value)
    if clip_norm is not None:
        gradients = [each.grad for each in updated if each.grad is not None]
        norm = math.sqrt(math.fsum(float(each.double().square().sum()) for each in gradients))
        for each in gradients:
            each.mul_(min(1.0, clip_norm / (norm + 1e-6)))
    stepper.step()
    if plain.masters:
        for parameter, master in zip(trained, updated, strict=True):
            parameter.data.copy_(master)


def validate(plain: Plain, model: nn.Module, loss: Callable[..., Any], batch: tuple[Any, Tensor], count: int) -> float:
    """Mean loss over the samples of ``batch``; leaves the model evaluating."""
    model.eval()
    with torch.no_grad():
        found = [(loss_of(plain, model, loss, x, y), len(y)) for x, y in parts(batch, count) if len(y)]
    return sum(float(total.double()) for total, _ in found) / sum(weight for _, weight in found)
