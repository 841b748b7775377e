"""Models that do something around their layers, or keep parts of themselves in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, SAMPLES = 6, 48


def blocks() -> list[nn.Module]:
    """Layers whose mode shows: by a mask of dropout that does not depend on the micro-batch, and a batch norm."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_mean = torch.randn(WIDTH)
    return [nn.Linear(4, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]


def still(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


class Chain(nn.Sequential):
    """Its batch norms never train."""

    def train(self, mode: bool = True) -> Chain:
        super().train(mode)
        still(self)
        return self


class Listed(nn.Module):
    """Lists its layers, and its batch norms never train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def train(self, mode: bool = True) -> Listed:
        super().train(mode)
        still(self)
        return self


class Whole(nn.Module):
    """Has no layers, and its batch norms never train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        return made

    def train(self, mode: bool = True) -> Whole:
        super().train(mode)
        still(self)
        return self


class Called(nn.Sequential):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 3 + 1)


def partly() -> nn.Module:
    made = nn.Sequential(*blocks())
    still(made)
    return made


def partly_within() -> nn.Module:
    made = nn.Sequential(Chain(*blocks()[:3]), *blocks()[3:])
    return made.train()


def as_a_whole() -> nn.Module:
    """As ``from_pretrained`` returns a model."""
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(1.0), nn.Linear(WIDTH, 3)).eval()


MODES: dict[str, Callable[[], nn.Module]] = {
    "chain with its own train": lambda: Chain(*blocks()),
    "listed, with its own train": Listed,
    "whole, with its own train": Whole,
    "a part in evaluation mode": partly,
    "a layer with its own train": partly_within,
    "a whole in evaluation mode": as_a_whole,
}


def plain() -> nn.Sequential:
    """A chain without batch norms."""
    return nn.Sequential(*(block for block in blocks() if not isinstance(block, nn.BatchNorm1d)))


def with_hook(register: str, hook: Callable[..., Any]) -> nn.Module:
    made = plain()
    registered: Callable[[Callable[..., Any]], object] = getattr(made, register)
    registered(hook)
    return made


def with_own_forward() -> nn.Module:
    made = plain()
    run = made.forward
    made.forward = lambda x: run(x * 3 + 1)  # type: ignore[method-assign, no-untyped-call]
    return made


AROUND: dict[str, Callable[[], nn.Module]] = {
    "pre-hook": lambda: with_hook("register_forward_pre_hook", lambda _, given: (given[0] * 3 + 1,)),
    "hook": lambda: with_hook("register_forward_hook", lambda _, given, made: made * 2 + given[0].sum(1, keepdim=True)),
    "call": lambda: Called(*plain()),
    "forward set on the object": with_own_forward,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return {**MODES, **AROUND}[kind]()


def listed_with_hook() -> nn.Module:
    made = Listed()
    made.register_forward_hook(lambda _, given, output: output * 2)
    return made


class Doubled(Listed):
    """Its forward is more than its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 3, generator=generator))
