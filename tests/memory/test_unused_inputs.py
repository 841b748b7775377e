"""A stage that uses a part of its input, passes a part on and drops the rest, whose gradients are zeros."""

from __future__ import annotations

import pytest
import torch
from programs import measured_and_predicted
from torch import Tensor, nn

from runner.memory.solve.values import Segment

SAMPLES, WIDTH, WIDE = 64, 8, 512
SCALARS = 80  # at most so many bytes of losses and totals, which a plan adds to what is predicted of the layers


class _Makes(nn.Module):
    """Three tensors of its input: one that is used next, one that is used in the end, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.map(value)
        return made, made.repeat(1, WIDE), made.repeat(1, 2 * WIDE)


class _Uses(nn.Module):
    """It maps the first tensor, passes on the second and drops the third, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return torch.relu(self.map(value[0])), value[1]


class _Joins(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1][:, -WIDTH:]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Makes(), _Uses(), _Joins())


@pytest.mark.parametrize(("schedule", "again"), [("1f1b", True), ("gpipe", False), ("zb_h1", False)])
def test_peaks_are_the_predicted_ones(schedule: str, again: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)
    programs = [(Segment(at, at, recompute=again and at == 1),) for at in range(3)]
    found, told = measured_and_predicted(make, nn.functional.mse_loss, batch, programs, schedule)
    assert all(real - SCALARS <= said <= 1.01 * real for real, said in zip(found, told, strict=True)), (found, told)
