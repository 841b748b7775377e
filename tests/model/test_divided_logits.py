"""Logits stay divided among ranks only where nothing but a loss that takes parts reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.config.compose.resolve import resolve
from runner.model.sharded.logits import loss_of_parts
from runner.profiling.logits import load_part
from runner.zoo.losses import cross_entropy

WIDTH, CLASSES = 8, 7


class Head(nn.Module):
    """Makes logits, with which its code does more in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen = way, torch.empty(0)
        self.logits = nn.Linear(WIDTH, CLASSES)

    def tensor_plan(self) -> dict[str, str]:
        return {"logits": "column_gathered"}

    def forward(self, value: Tensor) -> Any:
        made = self.logits(value)
        if self.way == "scaled":
            return made * 2
        if self.way == "inplace":
            return made.mul_(2)
        if self.way == "read":
            self.seen = made.argmax(-1)
        return made if self.way != "both" else (made, value)


def build(way: str = "plain", after: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, WIDTH), Head(way), *([nn.Softmax(-1)] if after else []))


def data(probabilities: bool = False) -> TensorDataset:
    inputs = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(16) % CLASSES
    return TensorDataset(inputs, nn.functional.one_hot(ids, CLASSES).float() if probabilities else ids)


def mine(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(output, target)


@pytest.mark.parametrize(
    ("overrides", "divided"),
    [
        ((), True),
        (("+loss.kwargs.ignore_index=3",), True),
        (("loss=token_cross_entropy",), True),
        (("+loss.kwargs.label_smoothing=0.1",), False),
        (("loss.target=test_divided_logits:mine",), False),
        (("data.kwargs.probabilities=true",), False),
        (("model.kwargs.after=true",), False),
        *((("model.kwargs.way=" + way,), False) for way in ("scaled", "inplace", "read", "both")),
    ],
)
def test_only_a_plain_loss_of_what_the_model_returns_takes_parts(
    overrides: tuple[str, ...], divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    loss = (
        () if any(each.startswith("loss=") or "loss.target" in each for each in overrides) else ("loss=cross_entropy",)
    )
    named = ("model.target=test_divided_logits:build", "data.target=test_divided_logits:data", "parallelism.tensor=2")
    config = resolve([*named, *loss, *overrides, "device=cpu", "data.batch_size=4"])
    inputs, targets = data("true" in str(overrides) and "probabilities" in str(overrides)).tensors
    model = load_part(config, inputs[:4], targets[:4])
    assert model.division is not None
    assert model.division.logits == ("1.logits" if divided else "")
    modules = [layer.build() for layer in model.layers]
    made: Any = inputs[:4]
    for module in modules:
        made = module(made)
    if divided:
        assert made.shape == (4, 4)
        assert model.division.vocabulary == CLASSES
        for module in modules:
            module.eval()
        whole: Any = modules[1](modules[0](inputs[:4]))
        assert whole.shape == (4, CLASSES)
        total, count = loss_of_parts(cross_entropy, config.loss, model.division)(whole, targets[:4])
        assert torch.equal(total, cross_entropy(whole, targets[:4])[0])
        assert int(count) == 4
    elif "both" not in str(overrides):
        assert made.shape == (4, CLASSES)
