"""Optimizers over stages, of which each has one of its own, in two replicas: the bits of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads
from narrow import present
from reference import accumulate, microbatches, train
from torch import nn

from runner.config.schema import OptimizerConfig
from runner.engine.engine import Engine
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.replicas import ReplicaExchange
from runner.errors import RequestError
from runner.optim.build import build_optimizer
from runner.optim.catalogue.registry import OPTIMIZERS
from runner.strategy.compressed import attach_compression, compressing

LAYOUT: dict[str, Any] = {"schedule": "1f1b", "pipeline": 2, "count": 2}
COMMON: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.98], "eps": 1e-4, "weight_decay": 0.1}
STEPS, FREEZE = 8, 5
OWN: dict[str, dict[str, Any]] = {
    "custom": {"target": f"{__name__}:half_sgd", "weight_decay": 0.0, "kwargs": {"momentum": 0.5}},
    "onebit_adam": {"freeze_step": FREEZE},
    "onebit_adam_refreshed": {"freeze_step": FREEZE, "variance_refreshes": 2},
    "onebit_lamb": {"freeze_step": FREEZE},
}
COMPRESSED = [name for name, kind in OPTIMIZERS.items() if kind.compresses]


def half_sgd(parameters: Iterable[torch.Tensor], lr: float, momentum: float) -> torch.optim.Optimizer:
    """A user's own."""
    return torch.optim.SGD(parameters, lr=lr / 2, momentum=momentum)


def made_by(name: str) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]:
    config = OptimizerConfig(name=name, **{**COMMON, **OWN.get(name, {})})
    return lambda parameters: build_optimizer(config, parameters)


def make_model() -> nn.Sequential:
    """The first stage has a tensor of 4096 elements, so that adam8bit keeps blocks of it."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 24), nn.Tanh())


def half_square(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (output - target).pow(2).mean(dim=1).sum() / 2, float(len(output))


@cache
def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [(torch.randn(8, 64, generator=generator), torch.randn(8, 24, generator=generator)) for _ in range(STEPS)]


@pytest.mark.parametrize("name", ["adabelief", "adam8bit", "custom", "lamb", "muon", "rmsprop"])
def test_two_stages_of_two_replicas_are_one_process(name: str) -> None:
    model = make_model()
    train(model, half_square, make_batches(), replicas=2, count=2, by_replica=True, optimizer=made_by(name))
    _, weights = train_in_threads(make_model, half_square, make_batches(), data=2, optimizer=made_by(name), **LAYOUT)
    assert [key for key, value in model.state_dict().items() if not torch.equal(weights[key], value)] == []


def replicas_by_hand(name: str) -> dict[str, torch.Tensor]:
    """Of two replicas, whole models whose stages have an optimizer each, which is given gradients by hand."""

    def run(transport: ThreadTransport) -> dict[str, torch.Tensor]:
        model = models[transport.rank]
        halves = [list(model[:2].parameters()), list(model[2:].parameters())]
        optimizers = [present(compressing(made_by(name)(half))) for half in halves]
        for optimizer in optimizers:
            optimizer.attach(ReplicaExchange(transport, (0, 1)))
        for inputs, targets in make_batches():
            x, y = microbatches(inputs, 2, 2), microbatches(targets, 2, 2)
            parts = [accumulate(model, half_square, list(zip(x[r : r + 2], y[r : r + 2], strict=True)), torch.float32)
                     for r in (0, 2)]  # fmt: skip
            own, weight = parts[transport.rank][2], sum(part[1] for part in parts)
            whole = [present(a) + present(b) for a, b in zip(parts[0][2], parts[1][2], strict=True)]
            for parameter, part, total in zip(model.parameters(), own, whole, strict=True):
                parameter.grad = (present(part) if optimizers[0].compresses else total) / weight
            for optimizer in optimizers:
                optimizer.step()
        return model.state_dict()

    models = [make_model() for _ in range(2)]  # here, because threads share the random generator
    return run_ranks(2, run)[0]


@pytest.mark.parametrize("name", COMPRESSED)
def test_replicas_of_a_stage_exchange_bits_among_themselves(name: str) -> None:
    models = [make_model() for _ in range(4)]

    def run(transport: ThreadTransport) -> tuple[dict[str, torch.Tensor], int]:
        kept: list[torch.optim.Optimizer] = []

        def keep(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            kept.append(made_by(name)(parameters))
            return kept[0]

        engine = make_engine(models[transport.rank], half_square, transport, data=2, optimizer=keep, **LAYOUT)
        exchange = present(attach_compression(kept[0], engine, []))
        for batch in make_batches():
            engine.submit(part_of(batch, transport, 2, 2))
        engine.drain()
        return {k: v for s in engine.stages.values() for k, v in s.global_state().items()}, exchange.rounds

    expected = replicas_by_hand(name)
    for state, rounds in run_ranks(4, run):
        assert 0 < rounds < STEPS
        assert [key for key, value in state.items() if not torch.equal(value, expected[key])] == []


@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_that_stages_share_are_refused_in_bits(name: str) -> None:
    optimizer = made_by(name)([nn.Parameter(torch.zeros(2))])
    with pytest.raises(RequestError, match=f"{name}: must exchange whole gradients .*embedding.weight"):
        attach_compression(optimizer, Mock(spec=Engine), ["embedding.weight"])
