"""Schedules that split backwards give the bits of one process to weights that pass something before their product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering
from layouts import train_in_threads
from reference import train
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from runner.schedule.catalogue import registry

WIDTH = 6


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return value.triu() + value.triu(1).t()


class FakeQuantized(nn.Linear):
    """Rounded to 4 bits, with the gradient of the identity."""

    def forward(self, value: Tensor) -> Tensor:
        scale = self.weight.detach().abs().max() / 7
        rounded = torch.fake_quantize_per_tensor_affine(self.weight, float(scale), 0, -8, 7)
        return functional.linear(value, self.weight + (rounded - self.weight).detach(), self.bias)


class LowRank(nn.Linear):
    """A frozen weight and a trained sum of low rank."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, value: Tensor) -> Tensor:
        return functional.linear(value, self.weight + (self.up @ self.down) * 0.5, self.bias)


class _Squashed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        made = weight.tanh()
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        made: Tensor = gradients[0] * (1 - ctx.saved_tensors[0] ** 2)
        return made


class OfFunction(nn.Linear):
    """A weight that passes a function of the user's."""

    def forward(self, value: Tensor) -> Tensor:
        weight: Tensor = _Squashed.apply(self.weight)  # type: ignore[no-untyped-call]
        return functional.linear(value, weight, self.bias)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


KINDS: dict[str, Callable[[], Any]] = {
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "parametrization": lambda: parametrize.register_parametrization(linear(), "weight", Symmetric()),
    "low rank": LowRank,
    "fake quantization": lambda: FakeQuantized(WIDTH, WIDTH),
    "function": lambda: OfFunction(WIDTH, WIDTH),
}


def make_model(kind: str) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), KINDS[kind](), nn.GELU()) for _ in range(8)))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, WIDTH, generator=generator), torch.randint(0, WIDTH, (16,), generator=generator))
        for _ in range(3)
    ]


MATRIX: dict[str, list[Any]] = {
    "kind": list(KINDS),
    "name": ["zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v", "interleaved_1f1b"],
    "ranks": [2, 4],
}


@pytest.mark.parametrize(list(MATRIX), covering(MATRIX, strength=2))
def test_equals_one_process(kind: str, name: str, ranks: int) -> None:
    schedule = registry.build(name, ranks=ranks, microbatches=2 * ranks)
    optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    options: dict[str, Any] = {"count": schedule.microbatches, "optimizer": optimizer}
    model, loss = make_model(kind), functional.cross_entropy
    expected = train(model, loss, make_batches(), **options)
    losses, weights = train_in_threads(
        partial(make_model, kind), loss, make_batches(), pipeline=ranks, data=1, schedule=schedule, **options
    )
    assert all(rank == expected for rank in losses)
    assert [key for key, value in model.state_dict().items() if not torch.equal(weights[key], value)] == []
