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
from runner.schedule.catalogue.registry import build

WIDTH, SAMPLES, COUNT, STEPS = 6, 8, 4, 3
FROZEN = ["0.*", "1.weight", "2.*"]
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


def plain_loop() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("0.", "2.")) and name != "1.weight")
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for inputs, targets in batches():
        model.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(COUNT), targets.tensor_split(COUNT), strict=True):
            loss = functional.mse_loss(model(x), y) * len(x)
            torch.autograd.backward(loss)
            total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= SAMPLES
        optimizer.step()
        losses.append(total / SAMPLES)
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 4), ("zb_h1", 4), ("zb_v", 2), ("gpipe", 1)])
def test_every_schedule_trains_as_a_plain_loop(schedule: str, pipeline: int) -> None:
    expected, weights = plain_loop()
    order = build(schedule, ranks=pipeline, microbatches=COUNT)

    def run(transport: ThreadTransport) -> Any:
        sources = frozen(layers_of(mlp_of[transport.rank], 0), FROZEN)
        engine = make_engine(
            sources, functional.mse_loss, transport, schedule=order, pipeline=pipeline, data=1, count=COUNT,
            optimizer=adamw,
        )  # fmt: skip
        losses = [f.loss for batch in batches() for f in engine.submit(part_of(batch, transport, pipeline, 1, order))]
        engine.drain()
        state = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        grads = [name for name, tag in engine.tags.items() if tag.is_trained]
        sent = engine.bytes_sent["gradient"]
        return losses, state, grads, sent

    mlp_of = [mlp() for _ in range(pipeline)]
    results = run_ranks(pipeline, run)
    found = {k: v for _, state, _, _ in results for k, v in state.items()}
    assert results[0][0] == expected
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    fresh = mlp().state_dict()
    kept = [name for name in fresh if torch.equal(found[name], fresh[name])]
    assert kept == ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]
    assert sum(len(grads) for _, _, grads, _ in results) == 11
    if schedule == "1f1b":  # stage 1 sends the gradient that 1.bias needs; layers 2 and 3 send theirs
        assert results[0][3] == 0
        assert all(sent > 0 for _, _, _, sent in results[1:])


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
