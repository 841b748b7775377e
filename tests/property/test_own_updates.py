"""What updates of a user's own optimizer need is seen before the run: the peak is never above the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from whole_runs import peaks, train

from runner.config.compose.resolve import resolve

_WORDS = (
    "model=custom", "data=custom", "loss=mse", "data.batch_size=2", "device=cpu", "hardware=laptop_cpu", "logger=none",
    "trainer.progress=false", "launcher.watchdog_seconds=null", "trainer.max_steps=3", "optimizer=custom",
    "profile.refresh=true",
)  # fmt: skip


class _Own(torch.optim.Optimizer):
    def __init__(self, weights: Iterable[Tensor], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.update([weight for weight in group["params"] if weight.grad is not None], group["lr"])

    def update(self, weights: list[Tensor], lr: float) -> None:
        raise NotImplementedError


class FourTemporaries(_Own):
    """Makes four tensors of the size of a weight, and keeps none."""

    def update(self, weights: list[Tensor], lr: float) -> None:
        for weight in weights:
            assert weight.grad is not None
            square, sign = weight.grad.square(), weight.grad.sign()
            root = square.sqrt()
            weight.sub_(root * sign, alpha=lr)


class InPlace(_Own):
    """Makes nothing."""

    def update(self, weights: list[Tensor], lr: float) -> None:
        for weight in weights:
            weight.sub_(weight.grad, alpha=lr)  # type: ignore[arg-type]


class AllAtOnce(_Own):
    """Makes a tensor for each weight before it changes the first."""

    def update(self, weights: list[Tensor], lr: float) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        moves = torch._foreach_mul(gradients, -lr)
        torch._foreach_add_(weights, moves)


OWN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "four": FourTemporaries,
    "in_place": InPlace,
    "at_once": AllAtOnce,
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
}


def make(parameters: Iterable[Tensor], lr: float, kind: str) -> torch.optim.Optimizer:
    return OWN[kind](parameters, lr=lr)


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 192), nn.Tanh(), nn.Linear(192, 8))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator))


@pytest.mark.parametrize("kind", OWN)
def test_the_peak_is_predicted(kind: str, tmp_path: Path) -> None:
    own = [f"{group}.target={__name__}:{name}" for group, name in _NAMES.items()]
    run = train(resolve([*_WORDS, *own, f"+optimizer.kwargs.kind={kind}"]), tmp_path)
    for counted, predicted in peaks(run):
        assert counted <= predicted <= counted * _MOST_ABOVE.get(kind, 1.01)


_NAMES = {"model": "build", "data": "data", "optimizer": "make"}
_MOST_ABOVE = {"adafactor": 1.05}  # its rows and columns are looked at on another shape
