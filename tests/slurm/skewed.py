"""A model whose ranks are never in lockstep, and takes its time."""

from __future__ import annotations

import os
import random
import time

import torch
from torch import Tensor, nn


class Slow(nn.Module):
    """Passes on what it gets; in jobs after a time that is another one each time, and longer on odd ranks."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        rank = int(os.environ.get("RANK", "0"))
        if "SLURM_JOB_ID" in os.environ:
            time.sleep(self._seconds)
            time.sleep(random.Random(time.perf_counter()).uniform(0.0, 0.01) * (1 + 3 * (rank % 2)))
        return x


def model(seconds: float = 0.0) -> nn.Sequential:
    """Every micro-batch takes ``seconds`` longer, in jobs."""
    slow = Slow(seconds)
    layers = [nn.Linear(6, 12), slow, nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 12), Slow(), nn.Linear(12, 3)]
    return nn.Sequential(*layers)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randn(64, 3, generator=generator)
    )
