"""A model that does not take its data because of the format of its weights is refused for the format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.profiling.model import profile_model

HERE = "test_formats_of_weights"


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(x)))
        return made


def chain(name: str) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).to(getattr(torch, name))


def whole(name: str) -> nn.Module:
    return Whole().to(getattr(torch, name))


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator))


def request(model: str, name: str, *words: str) -> RunConfig:
    named = [f"model.target={HERE}:{model}", f"model.kwargs.name={name}", f"data.target={HERE}:points"]
    return resolve([*named, "loss=cross_entropy", "data.batch_size=8", "device=cpu", *words])


@pytest.mark.parametrize(
    ("name", "precision", "model", "weight"),
    [("bfloat16", "bf16", "chain", "0.weight"), ("float16", "fp16", "whole", "first.weight")],
)
def test_the_format_is_named_with_the_way(name: str, precision: str, model: str, weight: str) -> None:
    said = rf"^precision\.name = fp32: must be the format of the weights, and {weight} is {name}\."
    with pytest.raises(RequestError, match=rf"{said}.* Try precision={precision}\.$"):
        profile_model(request(model, name, "parallelism.pipeline=2"))
    assert profile_model(request(model, name, "parallelism.pipeline=2", f"precision={precision}")).layers


def test_another_mistake_is_told_by_itself() -> None:
    with pytest.raises(RequestError, match=r"must make the model"):
        profile_model(request("chain", "nothing"))
