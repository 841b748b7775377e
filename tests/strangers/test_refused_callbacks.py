"""Callbacks that a run cannot have are refused where the request names them and where a module brings them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.lightning_module import lightning_problems
from runner.training.users_callbacks import build_callbacks

HERE = "test_refused_callbacks"


class Notes(Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        pass


class Clips(Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.nn.utils.clip_grad_value_(pl_module.parameters(), 0.1)


def accumulates() -> Callback:
    return GradientAccumulationScheduler({0: 2})


def averages() -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.1)


class Brings(pl.LightningModule):
    def __init__(self, callback: Callback) -> None:
        super().__init__()
        self.callback = callback

    def configure_callbacks(self) -> Any:
        return self.callback


REFUSED = {
    "Clips": "must not define Clips.on_after_backward, which is not called",
    "accumulates": "Try schedule.microbatches=2.",
    "averages": "Try trainer.ema_decay=0.999.",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items())
def test_they_are_refused(name: str, said: str) -> None:
    with pytest.raises(RequestError, match="callbacks.mine.target") as raised:
        build_callbacks(resolve(["model=mlp", f"callbacks.mine.target={HERE}:{name}"]))
    assert said in str(raised.value)
    (problem,) = lightning_problems(Brings(globals()[name]()), resolve([f"model.target={HERE}:Brings"]))
    assert said in problem.line()
    assert "Brings.configure_callbacks makes a" in problem.why


def test_others_are_not() -> None:
    build_callbacks(resolve(["model=mlp", f"callbacks.mine.target={HERE}:Notes"]))
    assert lightning_problems(Brings(Notes()), resolve([f"model.target={HERE}:Brings"])) == []
