"""Every exact strategy on the models of the rematerialization recipe, in one process and in pipelines: the same bits.

The models have batch norm, dropout, skips over many layers, and weights that all time steps share.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from layouts import train_in_threads, uniform
from torch import Tensor, nn

from runner.errors import RunFailedError
from runner.memory.apply.install import install
from runner.memory.solve.policies import solve, strategy_of
from runner.memory.solve.program import DEEPEST, depth
from runner.memory.solve.values import PolicyOptions, Program, StageChain
from runner.model.layers import StageModule, layers_of
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.measure import BUDGETED, STRATEGIES
from runner.recipes.rematerialization.models import MODELS, Task

COUNT = 4  # micro-batches
STEPS = 2
LAYOUTS = [(1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (2, "zb_h1"), (4, "zb_h1")]
OPTIONS = {
    **STRATEGIES,
    **{name: options for name, options in BUDGETED.items() if name != "auto"},  # it takes programs of the others
    "dtr online": PolicyOptions("dtr", online=True),
    "selective": PolicyOptions("selective", save_ops="matmuls"),
}
IN_PLACE = {  # what they say of torch's LSTM cell, which works in place on what it has saved
    "coop": "changes a tensor in place that a backward needs as it was",
    "dtr online": "changes a tensor in place that a backward needs as it was",
    "selective": "has been mutated",
}
LONG = 6  # layers of a stage beyond which the solver of checkmate and monet takes more than seconds


@cache
def task(name: str) -> Task:
    return MODELS[name]()


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return task(name).build()


@cache
def profile(name: str) -> ModelProfile:
    inputs, targets = (value[: len(value) // COUNT] for value in task(name).batch)
    return profile_layers(layers_of(make(name), 0), inputs, targets, task(name).loss, torch.float32)


@cache
def programs(name: str, strategy: str, pipeline: int) -> tuple[Program, ...]:
    """The programs of the stages; of those that a strategy offers for falling budgets, one that is among the last."""
    options, whole = OPTIONS[strategy], profile(name)
    stages = uniform(len(whole.layers), pipeline)
    candidates = strategy_of(options).candidates
    if candidates is None:
        return solve(whole, stages, options).stages
    found = []
    for stage, (first, last) in enumerate(stages):
        chain = StageChain(whole, first, last, options.values, in_flight=pipeline - stage)
        made = [each.program for each in candidates(chain) if depth(each.program) <= DEEPEST]
        found.append(made[len(made) * 3 // 4])
    return tuple(found)


@cache
def trained(
    name: str, strategy: str | None, pipeline: int, schedule: str
) -> tuple[list[list[float]], dict[str, Tensor]]:
    # Profiling draws random numbers: before there are ranks, because these are threads that share the generator.
    made = programs(name, strategy, pipeline) if strategy is not None else None

    def prepare(stage: StageModule, number: int) -> None:
        if made is not None:
            install(stage, made[number])

    return train_in_threads(
        partial(make, name), task(name).loss, [task(name).batch] * STEPS, pipeline=pipeline, data=1, schedule=schedule,
        count=COUNT, optimizer=partial(torch.optim.SGD, lr=0.1), prepare=prepare,
    )  # fmt: skip


def same_bits(name: str, strategy: str, pipeline: int, schedule: str) -> None:
    if strategy.startswith(("checkmate", "monet")) and len(profile(name).layers) > LONG * pipeline:
        pytest.skip("the solver takes minutes for stages of so many layers")
    if name == "LSTM" and strategy in IN_PLACE:
        with pytest.raises(RunFailedError, match=IN_PLACE[strategy]):
            trained(name, strategy, pipeline, schedule)
        return
    losses, weights = trained(name, None, pipeline, schedule)
    found, changed = trained(name, strategy, pipeline, schedule)
    assert found == losses
    assert changed.keys() == weights.keys()
    assert [key for key in weights if not torch.equal(weights[key], changed[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "rotor", "dtr full"])
@pytest.mark.parametrize("name", ["LSTM", "U-Net"])
def test_losses_weights_and_statistics_are_the_same_bits_in_two_stages(name: str, strategy: str) -> None:
    same_bits(name, strategy, 2, "zb_h1")


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("pipeline", "schedule"), LAYOUTS)
@pytest.mark.parametrize("strategy", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_weights_and_statistics_are_the_same_bits(
    name: str, strategy: str, pipeline: int, schedule: str
) -> None:
    same_bits(name, strategy, pipeline, schedule)
