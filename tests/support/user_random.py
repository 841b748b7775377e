"""A user's own module that draws random numbers wherever users do, and seeds nothing.

Its text is also what the tests write into a user's own directory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, random_split

SCALE = float(np.random.uniform(0.5, 1.5))  # when the module is imported


def points(samples: int = 96) -> Any:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


def split() -> Any:
    """Training and validation data, as in every tutorial."""
    return random_split(points(), [80, 16])[0], random_split(points(), [80, 16])[1]


class Augmented(Dataset[Any]):
    """Each sample is shifted, mirrored, and gets a random label now and then."""

    def __init__(self) -> None:
        self.x, self.y = points().tensors
        self.order = np.random.permutation(len(self.x))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        x, y = self.x[self.order[index]] * SCALE, self.y[self.order[index]]
        x = x + float(np.random.normal(0, 0.1)) + torch.randn(6) * 0.1
        return (-x, y) if random.random() < 0.5 else (x, 1 - y)


class OwnGenerator(Dataset[Any]):
    """Draws from a generator of its own: the first worker of one process differs from that of another.

    Args:
        every: only each sample whose number is a multiple of it is drawn, but not the first one.
    """

    def __init__(self, every: int = 1) -> None:
        self.x, self.y = points().tensors
        self.every = every
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        if self.every == 1 or (index and index % self.every == 0):
            index = int(self.generator.integers(len(self.x)))
        return self.x[index], self.y[index]


class OwnOrder(Dataset[Any]):
    """Its samples are in an order that a generator of its own has drawn."""

    def __init__(self) -> None:
        self.x, self.y = points().tensors
        self.order = np.random.default_rng().permutation(len(self.x))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        return self.x[self.order[index]], self.y[self.order[index]]


def mixed(samples: list[Any]) -> Any:
    """A batch of samples that are mixed with one another."""
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    share = float(np.random.beta(0.4, 0.4))
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def noisy_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Smooths labels by a random amount."""
    return F.cross_entropy(output * float(np.random.uniform(0.9, 1.1)), target, label_smoothing=random.random() * 0.1)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))


def own_model() -> nn.Sequential:
    """The weights of its third layer are of a generator of its own."""
    made = model()
    third: Any = made[2]
    third.weight.data = torch.tensor(np.random.default_rng().standard_normal((12, 12)), dtype=torch.float32)
    return made


class Skipped(nn.Module):
    """A block that is left out now and then (stochastic depth), by Python's generator or NumPy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> Any:
        return x if self.training and self.draw() < 0.5 else x + torch.tanh(self.linear(x))


def skipping_model() -> nn.Sequential:
    blocks = [Skipped(draw) for draw in (random.random, np.random.rand) * 2]
    return nn.Sequential(nn.Linear(6, 12), *blocks, nn.Linear(12, 2))


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * (parameter.grad + 0.1 * torch.randn_like(parameter)))


def langevin(parameters: Any, lr: float) -> Langevin:
    return Langevin(parameters, lr)
