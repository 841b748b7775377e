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


class NotFirst(Noisy):
    """Its samples are not numbers until all of them have been taken once."""

    passes = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        spoiled = self.passes < 1
        self.passes += index == len(self) - 1
        return inputs * (float("nan") if spoiled else 1.0), targets


def spoiled_first_validation() -> tuple[Noisy, Noisy]:
    return Noisy(44), NotFirst(8)


def data(samples: int = 44, validation: int = 8) -> tuple[Noisy, Noisy]:
    return Noisy(samples), Noisy(validation, noise=0.0)


def model(width: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
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


def biases_apart(parameters: list[Tensor], lr: float, decay: float = 0.1) -> torch.optim.Optimizer:
    """AdamW whose biases have half the learning rate and no decay."""
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    biases = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "lr": lr / 2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


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
