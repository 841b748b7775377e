"""Layers that are alike are profiled once, with the figures that each alone would have."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Value
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.config.compose.resolve import resolve
from runner.model.traced.module_structure import structure_of
from runner.profile import ModelProfile
from runner.profiling import alike
from runner.profiling.layer import profile_call
from runner.profiling.model import profile_model


class Scaled(nn.Linear):
    """A layer whose memory depends on a number that no shape shows, and which carries its input's companion on."""

    def __init__(self, times: int) -> None:
        super().__init__(32, 32)
        self.times = times

    def forward(self, both: Any) -> Any:
        value, first = both if isinstance(both, tuple) else (both, both)
        made = super().forward(value)
        for _ in range(self.times):
            made = made.tanh()
        return made, first


class Last(nn.Module):
    """The end of the chain, which needs what was carried."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


def scaled() -> nn.Sequential:
    """Eight layers of two kinds; the first one's input is the batch, which counts for nothing."""
    return nn.Sequential(*(Scaled(2 if at % 3 else 1) for at in range(8)), Last())


REQUESTS = {
    "gpt": ("model=gpt", "model.kwargs.layers=5", "model.kwargs.dropout=0.1"),
    "mlp": ("model=mlp",),
    "carried": (
        "model.target=test_alike_layers:scaled",
        "data=random_regression",
        "data.kwargs.outputs=32",
        "loss=mse",
    ),
    "four bits": ("model=mlp", "precision=fp4_emulated"),
    "traced": (
        "model=huggingface",
        "model.kwargs.model_type=llama",
        "model.kwargs.tie_word_embeddings=true",
        "+model.kwargs.attention_dropout=0.1",
        "parallelism.pipeline=2",
        "schedule.microbatches=2",
    ),
}


def profiled(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelProfile, int]:
    """A profile, and how many layers and losses were measured for it."""
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    calls = Value("i", 0)  # the child that profiles shares it

    def count(*args: Any) -> Any:
        calls.value += 1
        return profile_call(*args)

    monkeypatch.setattr(alike, "profile_call", count)
    return profile_model(resolve([*REQUESTS[name], "hardware=a100_80gb"])), calls.value


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt", "carried", "four bits"])
def test_the_profile_is_that_of_each_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, calls = profiled(tmp_path / "once", name, monkeypatch)
    monkeypatch.setattr(alike, "structure_of", lambda module: object())
    each, all_calls = profiled(tmp_path / "each", name, monkeypatch)
    assert once == each
    assert all_calls == len(each.layers)
    assert calls < all_calls


def _linear(**attributes: Any) -> nn.Module:
    made = nn.Linear(3, 3)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.Linear(3, 3, bias=False),
        lambda: nn.Linear(3, 3).requires_grad_(False),
        lambda: nn.Linear(3, 3).eval(),
        lambda: nn.Linear(3, 3, dtype=torch.float64),
        lambda: _linear(layer=1),
        lambda: _linear(options={"window": 2}),
        lambda: _linear(act=lambda value: value),
        lambda: _linear(table=torch.ones(3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ],
)
def test_what_differs_in_anything_is_not_alike(other: Callable[[], nn.Module]) -> None:
    assert structure_of(nn.Linear(3, 3)) == structure_of(nn.Linear(3, 3))
    assert structure_of(other()) != structure_of(nn.Linear(3, 3))


def test_weights_with_two_names_are_not_two_weights() -> None:
    two, one = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one[1].weight = one[0].weight
    assert structure_of(one) != structure_of(two)
