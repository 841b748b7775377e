"""What the campaign trains: a model and data so small that a step takes milliseconds, in plain PyTorch.

The model has dropout and the data noise of all three generators, so that a run that goes on with a wrong random state
has other losses.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Noisy", "data", "model"]


class Noisy:
    """Rows of 6 numbers, each with noise that is drawn anew whenever it is taken."""

    def __init__(self, samples: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(11)
        self._inputs = torch.randn(samples, 6, generator=generator)
        self._targets = torch.randn(samples, 3, generator=generator)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        return self._inputs[index] + self._noise * drawn, self._targets[index]


def model(width: int = 12) -> nn.Sequential:
    """Eight layers, so that four stages have two each."""
    inner = (nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU())
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *inner, nn.Linear(width, 3))


def data(samples: int = 44, validation: int = 8) -> tuple[Noisy, Noisy]:
    """Training data of six steps per epoch, the last one short, and validation data without noise."""
    return Noisy(samples, noise=0.1), Noisy(validation, noise=0.0)
