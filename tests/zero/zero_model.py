"""A model of equal layers, none of which is most of it."""

from __future__ import annotations

from torch import nn


def model(width: int = 128, depth: int = 12) -> nn.Sequential:
    middle = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(6, width), *middle, nn.Linear(width, 5))
