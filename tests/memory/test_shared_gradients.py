"""The gradient of a skip connection that was concatenated is a part of a larger tensor, which predictions count."""

from __future__ import annotations

import copy

import pytest
import torch
from test_budgets import SCALARS
from test_graph_programs import bench, plain
from torch import Tensor, nn

from runner.memory.apply.install import install
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.values import Program, Segment, StageChain
from runner.model.layers import layers_of
from runner.model.live_tracker import LiveTracker
from runner.plan.choices import program_cost
from runner.profiling.model import profile_layers

BATCH, WIDTH = 64, 32
TENSOR = BATCH * WIDTH * 4  # bytes


class _Skip(nn.Module):
    """Gives two tensors; the second one is for a later layer."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value.tanh(), value.sin()


class _Between(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        return (first + second if self.reads else first).sigmoid(), second


class _Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(pair, dim=0)


def chain_of(*, reads: bool) -> StageChain:
    linear = nn.Linear(WIDTH, WIDTH)
    made = nn.Sequential(linear, _Skip(), _Between(reads=False), _Between(reads=reads), _Join())
    given = torch.zeros(BATCH, WIDTH), torch.zeros(2 * BATCH, WIDTH)
    profile = profile_layers(layers_of(made, 0), *given, nn.functional.mse_loss, torch.float32)
    return StageChain(profile, 0, 4)


@pytest.mark.parametrize(("reads", "expected"), [(False, [0, TENSOR, TENSOR, 0, 0]), (True, [0] * 5)])
def test_the_whole_gradient_waits_until_another_use_adds_to_it(reads: bool, expected: list[int]) -> None:
    chain = chain_of(reads=reads)
    tensors = StageTensors(None, [*chain.layers, chain.profile.loss])
    found = [tensors.shared_gradient_bytes(at) for at in range(5)]
    assert found == expected  # where both parts wait, together they are the whole


def measured(program: Program) -> int:
    of = bench("U-Net")
    stage = copy.deepcopy(of.stage)
    install(stage, program)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs, targets = of.task.batch
    with LiveTracker() as tracker:
        torch.autograd.backward(of.task.loss(stage(inputs, torch.manual_seed), targets))
        peak: int = tracker.peak
    return peak


def test_chain_programs_of_a_network_with_skips_are_within_their_prediction() -> None:
    of = bench("U-Net")
    make = STRATEGIES["rotor"].candidates
    assert make is not None
    costs = [(program_cost(of.chain, each.program).peak_bytes, each.program) for each in make(of.chain)]
    costs.sort(key=lambda each: each[0])
    whole: Program = (Segment(of.chain.first, of.chain.last),)
    plain_bytes = program_cost(of.chain, whole).peak_bytes
    for predicted, program in (costs[0], costs[1], costs[len(costs) // 2], (plain_bytes, whole)):
        assert 0.99 * predicted <= measured(program) <= predicted + 520
    assert plain("U-Net").peak <= plain_bytes + SCALARS
