"""Convolutions before fully connected layers, and their data. Plain PyTorch: it imports nothing of the runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CHANNELS, HIDDEN, CLASSES, SIZE = 6, 20, 8, 8


class Trick(nn.Module):
    """Images [samples, 3, 8, 8] to logits [samples, classes]."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        middle: list[nn.Module] = [nn.BatchNorm2d(CHANNELS)] if norm else []
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), *middle,
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(CHANNELS * 16, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip

    def forward(self, value: Tensor) -> Any:
        return self.classifier(torch.flatten(self.features(value), 1))


def build(norm: bool = False) -> Trick:
    return Trick(norm)


def data(samples: int = 24) -> TensorDataset:
    images = torch.randn(samples, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(7))
    return TensorDataset(images, torch.randint(CLASSES, (samples,), generator=torch.Generator().manual_seed(8)))
