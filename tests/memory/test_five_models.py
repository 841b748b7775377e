"""Every exact strategy on the models of the rematerialization recipe, in one process and in pipelines: the same bits.

The models have batch norm, dropout, skips over many layers, and weights that all time steps share.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from covering import covering
from layouts import train_in_threads, uniform
from torch import Tensor, nn

from runner.errors import RequestError, RunFailedError
from runner.memory.apply.install import install
from runner.memory.solve.graph.checkmate import cheapest_order, rounded_order
from runner.memory.solve.graph.stage import graph_of, program_of_order
from runner.memory.solve.graph.values import replayed
from runner.memory.solve.policies import solve, strategy_of
from runner.memory.solve.program import DEEPEST, depth
from runner.memory.solve.strategies.checkmate import MOST_LAYERS
from runner.memory.solve.strategy import Candidate
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
LONG = 6  # layers of a stage beyond which checkmate and monet take minutes to solve all of their budgets
MOST = {"checkmate": MOST_LAYERS, "checkmate rounding": 32, "monet": MOST_LAYERS}  # layers of a stage; refused beyond


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
        if strategy in MOST and len(chain.layers) > LONG:
            found.append(one_of_many(chain, strategy))
            continue
        made = [each.program for each in candidates(chain) if depth(each.program) <= DEEPEST]
        found.append(made[len(made) * 3 // 4])
    return tuple(found)


def candidates_of(name: str, strategy: str, pipeline: int) -> list[Candidate]:
    """What a strategy offers for the first stage."""
    first, last = uniform(len(profile(name).layers), pipeline)[0]
    options = OPTIONS[strategy]
    candidates = strategy_of(options).candidates
    assert candidates is not None
    return list(candidates(StageChain(profile(name), first, last, options.values, in_flight=pipeline)))


def one_of_many(chain: StageChain, strategy: str) -> Program:
    """A program of checkmate or monet under one budget, about as good as the best, instead of those under twenty."""
    stage = graph_of(chain, with_operators=strategy == "monet")
    kept = sum(value.num_bytes for value in stage.graph.values[: stage.num_forward])
    most = replayed(stage.graph, stage.graph.once).peak_bytes + (chain.in_flight - 1) * kept
    for tenths in (7, 8, 9):
        budget, in_flight = most * tenths // 10, chain.in_flight
        if strategy == "checkmate rounding":
            order = rounded_order(stage.graph, budget, in_flight=in_flight)
        else:
            order = cheapest_order(stage.graph, budget, gap=0.1, nodes=50, in_flight=in_flight)
        if order is not None and order != stage.graph.once:
            return program_of_order(stage, order)
    raise AssertionError(f"no program of {strategy} runs anything again")


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
    if len(profile(name).layers) > MOST.get(strategy, 1000) * pipeline:
        with pytest.raises(RequestError, match="must not plan stages of more than"):
            candidates_of(name, strategy, pipeline)
        return
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
@pytest.mark.parametrize(
    ("name", "strategy"),
    covering({"name": ["LSTM", "U-Net"], "strategy": ["full", "rotor", "dtr full"]}, strength=1),
)
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
