"""Unrolled networks: time steps share weights with several matrices, and each reads the same sequence."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from layouts import uniform
from programs import measured_and_predicted
from test_budgets import SCALARS
from torch import Tensor, nn

from runner.memory.solve.adjust import adjusted
from runner.memory.solve.policies import strategy_of
from runner.memory.solve.values import ActivationPlan, PolicyOptions, Program, Segment, StageChain
from runner.model.layers import layers_of
from runner.model.live_tracker import LiveTracker
from runner.model.split.backward import backward_input, backward_weight
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers

WIDTH, TIME, SAMPLES, COUNT = 24, 6, 8, 4
LAYERS = TIME + 2
State = tuple[Tensor, Tensor, Tensor]


class _Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> State:
        made = self.map(sequence)
        return made, made[:, 0], made[:, 1]


class _Step(nn.Module):
    def __init__(self, cell: nn.LSTMCell, time: int) -> None:
        super().__init__()
        self.cell, self.time = cell, time

    def forward(self, state: State) -> State:
        sequence, hidden, memory = state
        return sequence, *self.cell(sequence[:, self.time], (hidden, memory))


class _End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> Tensor:
        made: Tensor = self.map(state[1])
        return made


def make(cells: int = 2) -> nn.Sequential:
    """As many steps of each cell, one cell after the other."""
    torch.manual_seed(0)
    shared = [nn.LSTMCell(WIDTH, WIDTH) for _ in range(cells)]
    return nn.Sequential(_Start(), *(_Step(shared[time * cells // TIME], time) for time in range(TIME)), _End())


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, TIME, WIDTH, generator=generator), torch.randn(samples, WIDTH, generator=generator)


@cache
def profile() -> ModelProfile:
    inputs, targets = (value[: SAMPLES // COUNT] for value in batch())
    return profile_layers(layers_of(make(), 0), inputs, targets, nn.functional.mse_loss, torch.float32)


def programs(kind: str, pipeline: int) -> tuple[Program, ...]:
    """The programs of the stages."""
    stages = uniform(LAYERS, pipeline)
    if kind == "kept":
        return tuple((Segment(first, last),) for first, last in stages)
    if kind == "each":
        return tuple(tuple(Segment(at, at, recompute=True) for at in range(first, last + 1)) for first, last in stages)
    if kind == "some":
        return tuple(
            (Segment(first, first), Segment(first + 1, last - 1, recompute=True), Segment(last, last))
            for first, last in stages
        )
    candidates = strategy_of(PolicyOptions(kind)).candidates
    assert candidates is not None
    return tuple(
        list(candidates(StageChain(profile(), first, last, {}, in_flight=pipeline - stage)))[-1].program
        for stage, (first, last) in enumerate(stages)
    )


@pytest.mark.parametrize(("kind", "pipeline", "schedule"), [("treewidth", 1, "1f1b"), ("some", 2, "zb_h1")])
def test_the_counted_peak_is_the_predicted_one(kind: str, pipeline: int, schedule: str) -> None:
    found, told = measured_and_predicted(
        make, nn.functional.mse_loss, batch(), programs(kind, pipeline), schedule, count=COUNT
    )
    for each, expected in zip(found, told, strict=True):
        assert 0.99 * expected <= each <= expected + SCALARS


@pytest.mark.parametrize("kind", ["each", "dtr"])
def test_a_tensor_that_no_later_layer_reads_has_no_gradient(kind: str) -> None:
    """The last layer does not read the sequence, whose gradient the last step makes.

    A step's backward frees its hidden states before its peak, which a profile of the step alone does not see; nor does
    it see whether the sum of two gradients of the largest weight is there at this peak.
    """
    found, told = measured_and_predicted(make, nn.functional.mse_loss, batch(64), programs(kind, 1), "1f1b", count=1)
    assert 0.94 * told[0] <= found[0] <= told[0] + SCALARS


def test_w_sums_the_gradients_of_a_weight_in_place() -> None:
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    linear.weight.grad = torch.zeros_like(linear.weight)
    given = torch.randn(2, WIDTH, requires_grad=True)
    value = given
    for _ in range(5):
        value = linear(value).tanh()
    _, pending = backward_input([value], [torch.ones_like(value)], [given])
    with LiveTracker() as tracker:
        backward_weight(pending)
    assert tracker.peak == 2 * linear.weight.nbytes


def test_what_the_gradients_of_weights_need_of_a_sequence_counts_once() -> None:
    plan = ActivationPlan(programs("kept", 1))
    (figures,) = stage_figures(adjusted(profile(), plan), [(0, LAYERS - 1)])
    samples = SAMPLES // COUNT
    row = 4 * samples * WIDTH  # bytes of a tensor of one time step
    needed = [TIME * row]  # the sequence
    needed += [TIME * row]  # its gradient, for the first layer
    needed += [TIME * 4 * row]  # what arrives at the gates of each step
    needed += [TIME * row]  # the hidden state after each step, which the next one or the last layer reads
    needed += [row]  # the gradient of the last layer's output
    needed += [TIME * row]  # the memory before each step, which autograd saves, but which no product reads: a bound
    assert figures.deferred_bytes == sum(needed)
