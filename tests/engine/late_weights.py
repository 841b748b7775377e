"""Trains where stages read other versions of their weights, and the same recurrence in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from layouts import make_engine, part_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.weights.predicted import PredictedWeights
from runner.schedule.values import Schedule

WIDTH, STEPS = 6, 8
Batches = Sequence[tuple[Tensor, Tensor]]
Weights = dict[str, Tensor]
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05)
MOMENTUM: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: Optimizer = partial(torch.optim.Adam, lr=0.01)


def make_model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
    )


def make_batches(samples: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    pairs = [torch.randn(2, samples, WIDTH, generator=generator) for _ in range(steps)]
    return [(inputs, targets) for inputs, targets in pairs]


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that are not the same bits."""
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


class Kept(NamedTuple):
    """A weight after some step, its optimizer's state then, and its gradient of that step."""

    weight: Tensor
    state: Mapping[str, Any]
    gradient: Tensor


Formula = Callable[[Kept, int, Any], Tensor]
"""From what is kept of a version, its number of steps, and a gap, to the weight that is read."""

Gap = Callable[[int, int, int], tuple[float, float | None]]
"""From stage, window and number of a micro-batch to the gaps of its forward and its backward; None: as its forward."""


def unpredicted(kept: Kept, steps: int, gap: float) -> Tensor:
    return kept.weight


def as_forward(stage: int, step: int, number: int) -> tuple[float, None]:
    return 0, None


def recurrence(
    batches: Batches,
    lags: Sequence[int],
    *,
    layers: int,
    count: int,
    optimizer: Optimizer,
    gaps: Gap = as_forward,
    formula: Formula = unpredicted,
    bellwether: bool = False,
) -> tuple[list[float], Weights]:
    """Losses and weights of one process that keeps every version of its weights.

    The forward of micro-batch m starts from the version max(0, (m - lag of its stage) // count), the backward, where
    it has a gap of its own, from m // count. With ``bellwether`` all of a window read what its first one does.
    """
    model = make_model(layers)
    made = optimizer(list(model.parameters()))
    named = dict(model.named_parameters())
    stage_of = {key: int(key.split(".")[0]) * len(lags) // layers for key in named}

    def kept() -> dict[str, Kept]:
        return {
            key: Kept(
                value.detach().clone(),
                {} if formula is unpredicted else copy.deepcopy(dict(made.state.get(value, {}))),
                torch.zeros(()) if value.grad is None else value.grad.clone(),
            )
            for key, value in named.items()
        }

    def read_at(key: str, version: int, gap: float) -> Tensor:
        own = versions[version][key]
        return formula(own, version, gap) if version and gap else own.weight

    versions, losses = [kept()], []
    for step, (inputs, targets) in enumerate(batches):
        total, weight = torch.zeros((), dtype=torch.float64), 0
        sums: Weights = {}
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for number, (given, wanted) in enumerate(parts):
            leader = 0 if bellwether else number
            read, back = {}, {}
            for key, stage in stage_of.items():
                version = max(0, (step * count + leader - lags[stage]) // count)
                forward, backward = gaps(stage, step, leader)
                read[key] = read_at(key, version, forward).clone().requires_grad_()
                back[key] = read[key].detach() if backward is None else read_at(key, step, backward)
            loss = functional.mse_loss(functional_call(model, read, (given,)), wanted) * len(given)
            for key, value in read.items():
                value.data.copy_(back[key].clone())
            loss.backward()  # type: ignore[no-untyped-call]  # the library's
            for key, value in read.items():
                assert value.grad is not None
                sums[key] = value.grad if key not in sums else sums[key] + value.grad
            total, weight = total + loss.detach().double(), weight + len(given)
        for key, parameter in named.items():
            parameter.grad = sums[key].div_(weight)
        made.step()
        versions.append(kept())
        losses.append(float(total / weight))
    return losses, {key: each.weight for key, each in versions[-1].items()}


@dataclass
class Trained:
    """What the ranks did; ``losses`` by rank, the rest by stage.

    Args:
        predictions: how often it has predicted its weights.
    """

    losses: list[list[float]]
    weights: Weights
    predictions: dict[int, int]

    def assert_equals(self, expected: tuple[list[float], Weights]) -> None:
        """Every rank's losses and every weight have the bits of a recurrence."""
        assert self.losses == [expected[0]] * len(self.losses)
        assert unequal(self.weights, expected[1]) == []


def train(
    batches: Batches,
    schedule: Schedule,
    *,
    count: int,
    optimizer: Optimizer,
    layers: int | None = None,
    data: int = 1,
    **options: Any,
) -> Trained:
    """Train with the engine, and drain the pipeline at the end."""
    ranks = schedule.ranks
    models = [make_model(layers or schedule.stages) for _ in range(ranks * data)]

    def run(transport: ThreadTransport) -> tuple[list[float], Weights, dict[int, int]]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=ranks, data=data,
            count=count, optimizer=optimizer, **options,
        )  # fmt: skip
        found = []
        for batch in batches:
            found += engine.submit(part_of(batch, transport, ranks, data, schedule))
        found += engine.drain()
        assert not engine._rank.windows
        assert [step.step for step in found] == list(range(len(batches)))
        weights = {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}
        predicted = {stage: each for stage, each in engine.stores.items() if isinstance(each, PredictedWeights)}
        made = {stage: each.predictions for stage, each in predicted.items()}
        return [step.loss for step in found], weights, made

    results = run_ranks(ranks * data, run)
    whole: tuple[Weights, dict[int, int]] = ({}, {})
    for _, weights, made in results:
        whole[0].update(weights)
        whole[1].update(made)
    return Trained([losses for losses, *_ in results], *whole)
