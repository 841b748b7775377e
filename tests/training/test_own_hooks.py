"""Hooks of a LightningModule that compute with weights of other ranks are refused by name; others are called."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn, no_grad
from torch.utils.weak import WeakIdKeyDictionary

from runner.errors import RequestError
from runner.training.own_hooks import guard_hooks


class Taught(pl.LightningModule):
    """Has a teacher that follows it, and hooks that look at weights in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        self.teacher = deepcopy(self.net).requires_grad_(False)
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        with no_grad():
            for mine, given in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(given, 0.1)

    def on_train_start(self) -> None:
        for weight in self.net.parameters():
            weight.data.mul_(0.5)

    def on_train_epoch_end(self) -> None:
        self.seen = [(weight.requires_grad, weight.grad, weight.device) for weight in self.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [weight.norm() for weight in self.net[1].parameters()]


def guarded(released: str) -> Taught:
    module, gone = Taught(), WeakIdKeyDictionary()
    guard_hooks(module, "mine:build", gone)
    for name, weight in module.named_parameters():
        if name.startswith(released):
            weight.data = weight.data.new_empty(0)
            gone[weight] = name
    return module


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_start"])
def test_a_hook_that_reads_released_weights_is_refused(hook: str) -> None:
    said = (
        rf"mine:build: .*Taught\.{hook} reads net\.0\.weight, whose values are on another rank alone\. Try parallelism"
    )
    with pytest.raises(RequestError, match=said):
        getattr(guarded("net.0"), hook)()


def test_what_a_weight_is_and_weights_of_this_rank_may_be_asked() -> None:
    module = guarded("net.0")
    module.on_train_epoch_end()
    assert len(module.seen) == 8
    module.on_before_optimizer_step(None)
    assert all(isinstance(each, Tensor) for each in module.seen)


def test_lightning_still_finds_the_hooks() -> None:
    module = guarded("none")
    assert is_overridden("on_train_batch_end", module)
    assert not is_overridden("on_train_end", module)
    module.on_train_batch_end()
