"""A model with dropout and a data set that augments at random, by all three generators."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn


class Noisy:
    """``samples`` rows of 6 numbers, each with noise that is drawn anew whenever it is taken."""

    def __init__(self, samples: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.targets = torch.randn(samples, 3, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        return self.inputs[index] + self.noise * drawn, self.targets[index]


def data(samples: int = 44, validation: int = 8) -> tuple[Noisy, Noisy]:
    return Noisy(samples), Noisy(validation, noise=0.0)


def model(width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
    )


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
    )


def tied() -> nn.Sequential:
    """A weight that stands in both of two stages."""
    layers = nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 3)
    )
    layers[4].weight = layers[2].weight
    return layers


def deeper() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 12), nn.Linear(12, 3))


OVERRIDES = [
    "model.target=resume_zoo:model",
    "data.target=resume_zoo:data",
    "loss=mse",
    "data.batch_size=8",  # 44 samples: an epoch of six steps, the last one short
    "schedule.microbatches=3",
    "lr_scheduler=cosine",
    "optimizer.lr=0.01",
    "trainer.grad_clip_norm=0.3",
    "trainer.max_steps=14",
    "trainer.val_every=4",
    "trainer.progress=false",
    "checkpoint.every=1",
    "checkpoint.keep=99",
    "logger=none",
    "device=cpu",
]
