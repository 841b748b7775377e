"""Gradients of weights that several layers share wait in autograd; predicted peaks count them."""

from __future__ import annotations

import copy

import pytest
import torch
from programs import measured_and_predicted
from test_budgets import SCALARS
from torch import Tensor, nn

from runner.memory.solve.shared_weights import SharedGradients
from runner.memory.solve.values import ChainProgram, Segment
from runner.profile import SharedWeight

WIDTH, SAMPLES = 48, 32


class _Step(nn.Module):
    """A step of which all others have the same weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value)) + value


def make_steps() -> nn.Sequential:
    """Twelve layers; the second to the fifth share weights, and so do the seventh to the eleventh."""
    torch.manual_seed(0)
    shared = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    own = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    steps = [[_Step(linear) for _ in range(4 + number)] for number, linear in enumerate(shared)]
    return nn.Sequential(own[0], *steps[0], own[1], *steps[1], own[2])


def test_what_waits_is_made_by_the_last_layer_and_goes_with_the_first() -> None:
    weights = (SharedWeight((2, 4, 5), 8, 8), SharedWeight((4, 9), 100, 100))
    waiting = SharedGradients(5, weights, 2)  # layers 2 to 6, so that the second weight has one user here
    assert [waiting.behind(at) for at in range(5)] == [8, 8, 8, 0, 0]
    assert [waiting.left_by(at) for at in range(5)] == [-8, 0, 0, 8, 0]


def again(first: int, last: int) -> Segment:
    return Segment(first, last, recompute=True)


PROGRAMS: dict[str, ChainProgram] = {
    "none": (Segment(0, 11),),
    "each": tuple(again(at, at) for at in range(12)),
    "threes": tuple(again(at, at + 2) for at in range(0, 12, 3)),
    "whole": (again(0, 11),),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_predicted_peak_counts_what_waits(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))
    program = copy.deepcopy(PROGRAMS[name])
    found, told = measured_and_predicted(
        make_steps, nn.functional.mse_loss, (batch[0], batch[1]), [program], "1f1b", count=1
    )
    assert 0.99 * told[0] <= found[0] <= told[0] + SCALARS
