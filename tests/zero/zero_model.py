"""A model of equal layers, none of which is most of it, and one that reads a module's weight without calling it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import user_code
from torch import Tensor, nn


def model(width: int = 128, depth: int = 12) -> nn.Sequential:
    middle = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(6, width), *middle, nn.Linear(width, 5))


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.places = nn.Linear(6, 12), nn.Embedding(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(x) + self.places.weight[:2].sum(0)  # type: ignore[no-any-return]


def placed() -> nn.Sequential:
    return nn.Sequential(Placed(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 5))


class Stepping(pl.LightningModule):
    """A module with a step of its own, whose gradients nobody but Lightning would clear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return user_code.mean(self(inputs), targets)
