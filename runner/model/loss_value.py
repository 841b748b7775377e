"""What a loss gives for some samples, with its gradient by the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.model.boundary import flatten, map_tensors, unflatten
from runner.model.data import LossFunction, checked_weight, loss_sum
from runner.model.figures import bare
from runner.model.precision import for_loss

__all__ = ["Evaluate", "Value", "has_samples", "of_output", "value_of"]


@dataclass(frozen=True)
class Value:
    """What a loss gives for some samples.

    Args:
        total, weight: its sum and weight; of a mean, the weight is the number of samples.
        is_pair: whether it returned both itself.
        eps: the rounding step of its dtype.
        gradients: the gradients of the sum by the output's tensors; empty if there are none.
        foreign: weights with a gradient that are not of the model.
    """

    total: float
    weight: float
    is_pair: bool
    eps: float
    gradients: tuple[Tensor, ...] = ()
    foreign: tuple[Tensor, ...] = field(default=(), compare=False)

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else math.nan


Evaluate = Callable[[Sequence[int]], Value]
"""The loss of the samples with these numbers, in this order; a number may come twice."""


def has_samples(value: Any, samples: int) -> bool:
    """Whether every tensor of ``value`` has the samples on its first axis."""
    tensors = flatten(value)[0]
    return bool(tensors) and all(tensor.dim() and len(tensor) == samples for tensor in tensors)


def of_output(loss: LossFunction, output: Any, targets: Any, *, known: Sequence[Tensor] = ()) -> Evaluate:
    """The loss of the given rows of a model's output and of its targets, with gradients by the output.

    Args:
        loss: the loss function.
        output, targets: values whose tensors have the samples on the first axis.
        known: the model's own weights.
    """
    tensors, structure = flatten(for_loss(output))
    own = {id(tensor) for tensor in known}

    def evaluate(rows: Sequence[int]) -> Value:
        index = torch.tensor(list(rows), device=tensors[0].device)
        leaves = [_leaf(tensor.detach()[index]) for tensor in tensors]
        wanted = map_tensors(lambda tensor: tensor[index.to(tensor.device)], targets)
        with torch.enable_grad():
            made = loss(unflatten(leaves, structure), wanted)
        return value_of(made, len(rows), [leaf for leaf in leaves if leaf.requires_grad], own)

    return evaluate


def value_of(made: Any, samples: int, leaves: Sequence[Tensor] = (), known: Collection[int] = ()) -> Value:
    """The :class:`Value` of what a loss returned.

    Args:
        made: the return value.
        samples: the number of samples.
        leaves: the output's tensors by which it is differentiated.
        known: ids of weights that are trained.

    Raises:
        RequestError: see :func:`runner.model.data.loss_sum`.
    """
    made = bare(made)
    total, weight = loss_sum(made, samples)
    given = made[0] if isinstance(made, tuple) else made
    foreign = tuple(leaf for leaf in _leaves_of(total) if id(leaf) not in known and all(leaf is not o for o in leaves))
    gradients: tuple[Tensor, ...] = ()
    if leaves and total.requires_grad:
        found = torch.autograd.grad(total, list(leaves), allow_unused=True)
        pairs = zip(found, leaves, strict=True)
        gradients = tuple((torch.zeros_like(leaf) if each is None else each).double() for each, leaf in pairs)
    eps = torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0
    return Value(float(total.detach()), checked_weight(float(weight)), isinstance(made, tuple), eps, gradients, foreign)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _leaves_of(total: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph of ``total`` would give gradients to."""
    waiting, seen = [total.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of an AccumulateGrad
        if isinstance(variable, Tensor):
            yield variable
        waiting += [parent for parent, _ in node.next_functions]
