"""Models whose constructors do what fake tensors cannot: the command plans them, and ends by itself."""

from __future__ import annotations

import copy
import ctypes
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.config.compose.resolve import resolve
from runner.profiling.model import profile_model

torchmetrics = pytest.importorskip("torchmetrics")


def copied_batch_norm() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(3)), nn.Linear(6, 5))


class Measured(nn.Module):
    """Holds a metric, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=5)
        self.best = torchmetrics.MinMetric()

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.net(value)
        return made


class Reads(nn.Module):
    """Reads its weight's memory in the constructor: of a fake tensor, that of nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)
        if type(self.net.weight.data) is not Tensor:
            ctypes.string_at(0)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.net(value)
        return made


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(("name", "on_real"), [("copied_batch_norm", False), ("Measured", False), ("Reads", True)])
def test_the_model_is_profiled(
    name: str, on_real: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "runner")
    user = ("data.target=user_code:points", "loss.target=user_code:mean", "hardware=a100_80gb", "data.batch_size=4")
    profile = profile_model(resolve([f"model.target=test_crashes:{name}", *user]))
    module = globals()[name]()
    assert profile.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    told = [record.getMessage() for record in caplog.records]
    because = "profiled on real tensors, because fake tensors cannot run the model: its process ended by SIGSEGV"
    assert told == ([because] if on_real else [])
    torch.randn(3).sum()
