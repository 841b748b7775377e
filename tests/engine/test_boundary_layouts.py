"""What crosses from stage to stage keeps its layout in memory, and so the bits of sums over it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from orders import in_order, zigzag
from reference import train
from torch import Tensor, nn
from torch.nn import functional

from runner.schedule.catalogue import registry
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.values import Schedule

HEADS, TOKENS, SIZE = 3, 33, 17


class Scaled(nn.Module):
    """Scales the last axis of [batch, tokens, heads, size], then gives a view: [batch, heads, tokens, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))  # a step of its size: nothing of the gradient is rounded away

    def forward(self, value: Tensor) -> Tensor:
        return (value * (1 + self.weight)).transpose(1, 2)


class Mixed(nn.Module):
    """Mixes the tokens of each head: its input's gradient is a product, contiguous as [batch, heads, tokens, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS) * 0.2)

    def forward(self, value: Tensor) -> Tensor:
        return self.weight @ value


class Back(nn.Module):
    """Scales as ``Scaled`` does, on the way back; its input's gradient has the layout of its own input's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))  # a step of its size: nothing of the gradient is rounded away

    def forward(self, value: Tensor) -> Tensor:
        return value.transpose(1, 2).tanh() * (1 + self.weight)


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(kind() for _ in range(3) for kind in (Scaled, Mixed, Back)), nn.Flatten(1))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.pow(2).mean(1), target)


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, TOKENS, HEADS, SIZE, generator=generator), torch.randn(8, generator=generator))
        for _ in range(2)
    ]


def assert_equals_one_process(schedule: Schedule) -> None:
    options: dict[str, Any] = {"count": 4, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    model = make_model()
    expected = train(model, loss, make_batches(), **options)
    losses, weights = train_in_threads(
        make_model, loss, make_batches(), pipeline=schedule.ranks, data=1, schedule=schedule, **options
    )
    different = [name for name, value in model.state_dict().items() if not torch.equal(weights[name], value)]
    assert different == []
    assert all(rank == expected for rank in losses)


@pytest.mark.parametrize("delay", [None, 0, 2], ids=["whole", "fused", "split"])
def test_stages_of_one_rank(delay: int | None) -> None:
    assert_equals_one_process(fuse_backwards(in_order(zigzag(1, 5), 4, ahead=1, delay=delay)))


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 5), ("interleaved_1f1b", 2), ("zb_v", 3)])
def test_stages_of_several_ranks(name: str, ranks: int) -> None:
    assert_equals_one_process(fuse_backwards(registry.build(name, ranks=ranks, microbatches=4)))
