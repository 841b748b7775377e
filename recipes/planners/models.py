"""Models of the workloads: a convolutional net, and layers that sleep, so that any machine has a core for each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

__all__ = ["Sleep", "convolutional", "images", "numbers", "sleeping"]


def convolutional(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """A VGG of 13 convolutions and 3 linear layers, without batch norms, for images of 3 x 224 x 224."""
    layers, channels = list[nn.Module](), 3
    for factor, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for number in range(count):
            out = factor * width
            block: list[nn.Module] = [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            layers.append(nn.Sequential(*block, *([nn.MaxPool2d(2)] if number == count - 1 else [])))
            channels = out
    layers.append(nn.Sequential(nn.Flatten(), nn.Linear(channels * 49, 64 * width), nn.ReLU()))
    layers.append(nn.Sequential(nn.Linear(64 * width, 64 * width), nn.ReLU()))
    layers.append(nn.Linear(64 * width, classes))
    return nn.Sequential(*layers)


def images(samples: int = 256, classes: int = 1000) -> TensorDataset:
    """Random images and their classes."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.rand(1, 3, 224, 224, generator=draw).expand(samples, -1, -1, -1)
    return TensorDataset(pictures, torch.randint(classes, (samples,), generator=draw))


class _Slept(torch.autograd.Function):
    """The identity, which takes its time in each direction."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Sleep(nn.Module):
    """A product of [samples, 8] that sleeps: ``seconds`` for each sample in a forward, twice that in a backward.

    With a ``width``, it is two products, by way of so many numbers: weights without large messages.
    """

    def __init__(self, seconds: float, width: int = 0) -> None:
        super().__init__()
        self.seconds = seconds
        self.product = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) if width else nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        slept: Tensor = _Slept.apply(self.product(value), self.seconds * len(value))  # type: ignore[no-untyped-call, unused-ignore]
        return slept


def sleeping(seconds: Sequence[float], width: int = 0) -> nn.Sequential:
    """A layer for each number of seconds; see :class:`Sleep`."""
    return nn.Sequential(*(Sleep(each, width) for each in seconds))


def numbers(samples: int = 64) -> TensorDataset:
    """Random numbers and targets."""
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(samples, 8, generator=draw), torch.rand(samples, 8, generator=draw))
