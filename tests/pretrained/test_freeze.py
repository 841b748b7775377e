"""Frozen weights: no gradient, no state, no message and no change; what comes before the first trained one is cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from torch import nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RequestError
from runner.model.freeze import frozen
from runner.model.layers import layers_of
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

WIDTH, SAMPLES, COUNT, STEPS = 6, 8, 4, 3
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)  # decay would move a frozen weight


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    return nn.Sequential(*layers)


class Listed(nn.Module):
    """Layers that are built one by one, the last with a weight that is frozen by its own name."""

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def layers(self) -> list[nn.Module]:
        return [self.first, self.last]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, SAMPLES, WIDTH, generator=generator)) for _ in range(STEPS)]


def trained_names(model: Any, patterns: Sequence[str]) -> list[str]:
    layers = frozen(layers_of(model, 0), patterns)
    built = [(layer, layer.build()) for layer in layers]
    return [
        layer.full_name(name) for layer, module in built for name, p in module.named_parameters() if p.requires_grad
    ]


def test_names_of_modules_that_exist_and_of_those_that_are_built_later() -> None:
    assert trained_names(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), ["*.bias"]) == ["0.weight", "1.weight"]
    assert trained_names(Listed(), ["0.*"]) == ["1.weight", "1.bias"]
    assert trained_names(Tied(), ["last.weight"]) == ["first.bias", "last.bias"]  # by any of its names
    assert trained_names(Listed(), []) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_first_stage_that_is_frozen_gets_no_gradient() -> None:
    mlp_of = [mlp() for _ in range(4)]

    def run(transport: ThreadTransport) -> int:
        sources = frozen(layers_of(mlp_of[transport.rank], 0), ["0.*", "1.*", "2.*", "3.*"])
        engine = make_engine(
            sources, functional.mse_loss, transport, schedule="1f1b", pipeline=4, data=1, count=COUNT,
            optimizer=adamw,
        )  # fmt: skip
        for batch in batches():
            engine.submit(part_of(batch, transport, 4, 1))
        engine.drain()
        return engine.bytes_sent["gradient"]

    sent = run_ranks(4, run)
    assert sent[:3] == [0, 0, 0]
    assert sent[3] > 0


@pytest.mark.costly
def test_the_plan_knows_it() -> None:
    asked = ["model=mlp", "model.kwargs.layers=8", "parallelism.pipeline=2", "schedule.microbatches=2", "device=cpu"]
    asked += ["partition=uniform", "optimizer=adam"]
    usual, cheap = (resolve([*asked, *more]) for more in ([], ["trainer.freeze=[0.*,1.*,2.*,3.*]"]))
    profile = profile_model(cheap)
    before = [layer for layer in profile.layers if not layer.gradient_bytes and layer.num_parameters]
    assert before
    assert all(layer.backward_flops == 0 and layer.output_gradient_bytes == 0 for layer in before)
    plans = [make_plan(config, profile_model(config)) for config in (usual, cheap)]
    parts = [plan.to_json()["parts"][0] for plan in plans]
    assert parts[0]["gradients"] > 0 < parts[0]["optimizer"]
    assert parts[1]["gradients"] == 0 == parts[1]["optimizer"]
    assert parts[1]["weights"] == parts[0]["weights"]


def test_wrong_patterns() -> None:
    def told(freeze: str) -> str:
        with pytest.raises(RequestError) as refused:
            profile_model(resolve(["model=mlp", f"trainer.freeze={freeze}", "device=cpu"]))
        return str(refused.value)

    assert told("[nothing]").startswith("trainer.freeze = nothing: must match names of weights. The nearest name is ")
    assert "Try 'trainer.freeze=[0.*]'." in told("[0]")
    assert told("['*']").startswith("trainer.freeze = ['*']: must leave a weight to train. It matches all of them.")
