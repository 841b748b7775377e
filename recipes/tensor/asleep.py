"""A model of transformers whose maps sleep, so that each rank has a device of its own on any machine.

Each linear map of a Llama, which is otherwise as transformers makes it, sleeps as long as a slow device would take for
the weights that this rank holds: ``seconds`` for a million products of a forward, twice that in a backward. What a rank
computes takes hardly any of a core, and what ranks send each other is real.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.zoo.huggingface import build

__all__ = ["llama", "tokens"]


@torch.library.custom_op("runner_recipes::rest", mutates_args=())
def rest(value: Tensor, seconds: float) -> Tensor:
    """A copy of a value, after a sleep of so many seconds for each of its rows, and twice as many in the backward.

    It counts the rows itself, because a trace would hold the number of those that it was made with.
    """
    time.sleep(seconds * (value.numel() // value.shape[-1]))
    return value.clone()


@rest.register_fake
def _(value: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return rest(gradient, 2 * ctx.seconds), None


rest.register_autograd(_backward, setup_context=_keep)


class Sleeping(nn.Linear):
    """A linear map that sleeps, for each product of a weight that it has."""

    seconds: float

    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value)
        slept: Tensor = rest(made, self.seconds * self.weight.numel() / 1e6)
        return slept


def llama(seconds: float, **sizes: Any) -> nn.Module:
    """A Llama of transformers with random weights, whose maps sleep.

    Args:
        seconds: for a million products.
        sizes: fields of its configuration.
    """
    model = build(model_type="llama", **sizes)
    for each in model.modules():
        if type(each) is nn.Linear:
            each.__class__ = Sleeping
            each.seconds = seconds  # type: ignore[assignment]
    return model


def tokens(samples: int, length: int, vocabulary: int) -> TensorDataset:
    """Random ids, each of which is to be told from those before it."""
    drawn = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn[:, :-1].clone(), drawn[:, 1:].clone())
