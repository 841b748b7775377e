"""Convolutions before fully connected layers, and their data. Plain PyTorch: it imports nothing of the runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CHANNELS, HIDDEN, CLASSES, SIZE = 6, 20, 8, 8


class Trick(nn.Module):
    """Images [samples, 3, 8, 8] to logits [samples, classes]."""

    def __init__(self, norm: bool = False, groups: int = 1) -> None:
        super().__init__()
        middle: list[nn.Module] = [nn.BatchNorm2d(CHANNELS)] if norm else []
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), *middle,
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(CHANNELS * 16, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip

    def forward(self, value: Tensor) -> Any:
        return self.classifier(torch.flatten(self.features(value), 1))


def build(norm: bool = False, groups: int = 1) -> Trick:
    return Trick(norm, groups)


def data(samples: int = 24) -> TensorDataset:
    images = torch.randn(samples, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(7))
    return TensorDataset(images, torch.randint(CLASSES, (samples,), generator=torch.Generator().manual_seed(8)))


def trained(start: dict[str, Tensor], batch: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and weights at the end, of one process that begins with given weights."""
    model = build()
    model.load_state_dict(start)
    optimizer, samples, losses = torch.optim.SGD(model.parameters(), 0.1, 0.9), data(), []
    for step in range(steps):
        places = [(step * batch + at) % len(samples) for at in range(batch)]
        inputs, targets = (torch.stack([samples[place][part] for place in places]) for part in (0, 1))
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}
