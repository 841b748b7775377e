"""Optimizers of strangers that one process can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class ByAll(torch.optim.Optimizer):
    """Divides by the norm of all gradients, as a learning rate that is found over all weights does."""

    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        there = [weight for weight in group["params"] if weight.grad is not None]
        norm = torch.sqrt(torch.stack([weight.grad.square().sum() for weight in there]).sum())
        for weight in there:
            weight.sub_(group["lr"] * weight.grad / norm)


class ByEach(ByAll):
    """Divides by the norm of each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["lr"] * weight.grad / weight.grad.norm())


class TwoSets(ByEach):
    """Has weights for training and others for evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


MAKERS: dict[str, Callable[[Iterable[Tensor], float], torch.optim.Optimizer]] = {
    "by_all": ByAll,
    "by_each": ByEach,
    "two_sets": TwoSets,
    "by_closure": torch.optim.LBFGS,
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}


def make(parameters: Iterable[Tensor], lr: float, kind: str) -> torch.optim.Optimizer:
    return MAKERS[kind](parameters, lr)


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Module(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, build()

    def layers(self) -> list[nn.Module]:
        return list(self.net)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return MAKERS[self.kind](self.parameters(), 0.1)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 3, generator=generator))
