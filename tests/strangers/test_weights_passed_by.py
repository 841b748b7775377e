"""Trained weights that no gradient of the loss reaches are told before a run, and adapters among them refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.data import example_batch
from runner.profiling.meet import meet
from runner.profiling.model import profile_model

WIDTH = 8


class Attending(nn.Module):
    """Attention over the one token of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None]
        made: Tensor = self.attention(tokens, tokens, tokens)[0].squeeze(1)
        return made


class Sparing(nn.Module):
    """Has a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.used(x)
        return made


def attending() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), Attending(), nn.Linear(WIDTH, 3))


def sparing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, WIDTH), Sparing(), nn.Linear(WIDTH, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator))


def met(model: str, *words: str) -> None:
    here = "test_weights_passed_by"
    named = [f"model.target={here}:{model}", f"data.target={here}:data", "data.batch_size=8", "loss=mse", "device=cpu"]
    config = resolve([*named, *words])
    meet(config, profile_model(config), example_batch(config.data, 8, config.seed))


def test_an_adapter_that_is_passed_by_is_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(
        RequestError, match=r"must name layers that are called. No gradient reaches 1\.attention\.out_proj"
    ):
        met("attending", "adapter=lora", "adapter.targets=[out_proj]")


def test_another_one_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("peft")
    met("attending", "adapter=lora", "adapter.targets=['0','2']")
    assert "no gradient" not in caplog.text


def test_other_weights_are_told(caplog: pytest.LogCaptureFixture) -> None:
    met("sparing")
    assert "no gradient of a first batch reaches 1.spare.weight, 1.spare.bias: what nothing uses" in caplog.text
