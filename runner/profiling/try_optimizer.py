"""Tries an optimizer that does not describe itself, on two small weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError
from runner.optim.catalogue.registry import optimizer_of

__all__ = ["try_optimizer", "try_own_optimizer"]

_STEPS = 3
_SHAPES = (4, 4), (4,)


def try_optimizer(config: RunConfig) -> None:
    """Refuse an optimizer of a user's function that this run cannot use as one process would.

    Raises:
        RequestError: it has other weights for evaluation, or needs a closure, or looks at all weights at once where
            ranks have parts of them.
    """
    kind, section = optimizer_of(config.optimizer), config.optimizer
    if section.target is None or kind.elementwise or kind.values is not None:
        return
    try_own_optimizer(config, partial(kind.make, section), "optimizer.target", section.target)


def try_own_optimizer(config: RunConfig, make: Callable[[list[Tensor]], Optimizer], path: str, target: str) -> None:
    """:func:`try_optimizer` for what ``make`` makes of a list of weights, which ``path`` names."""
    made = make(_weights())
    if all(callable(getattr(made, name, None)) for name in ("train", "eval")):
        rule = "must have one set of weights"
        why = f"{type(made).__name__} has others for evaluation: nothing here calls its train() and eval()"
        raise RequestError([Problem(path, target, rule, why)])
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        rule = "must take a step from the gradients that are there"
        why = f"{type(made).__name__}.step needs a closure, which computes the loss again"
        raise RequestError([Problem(path, target, rule, why)])
    degrees = [name for name in ("pipeline", "tensor") if getattr(config.parallelism, name) > 1]
    if not degrees:
        return
    try:
        together, alone = _updated(make, len(_SHAPES)), _updated(make, 1)
    except Exception:  # it may need a closure, or other weights; the ranks tell
        return
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-7):
        rule = f"must update each weight by itself in a run with parallelism.{degrees[0]} above 1"
        why = f"{type(made).__name__} changes a weight otherwise if it has another one beside it, and a rank has a part"
        fix = " ".join(f"parallelism.{name}=1" for name in degrees)
        raise RequestError([Problem(path, target, rule, why, fix)])


def _weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


def _updated(make: Callable[[list[Tensor]], Optimizer], count: int) -> Tensor:
    """The first weight after some steps of an optimizer that has the first ``count`` weights."""
    weights, generator = _weights(), torch.Generator().manual_seed(1)
    gradients = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)]
    optimizer = make(weights[:count])
    torch.manual_seed(0)
    for of_step in gradients:
        for weight, gradient in zip(weights[:count], of_step, strict=False):
            weight.grad = gradient.clone()
        optimizer.step()
    return weights[0].detach()
