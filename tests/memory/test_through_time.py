"""Backpropagation through time in little memory: what is published, counted in a run of an LSTM of 1,000 steps."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from runner.memory.apply.install import install
from runner.memory.solve.policies import solve
from runner.memory.solve.program import Step, operations
from runner.memory.solve.values import ChainProgram, PolicyOptions
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.profiling.model import profile_layers

STEPS, SAMPLES, WIDTH = 1000, 64, 16

State = tuple[Tensor, Tensor]


class _Step(nn.Module):
    """A step of an LSTM that reads what it has said; its state is (hidden, memory), both [samples, width]."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, state: State) -> State:
        made: State = self.cell(state[0], state)
        return made


class _Start(nn.Module):
    """The first state: what is given, twice."""

    def forward(self, value: Tensor) -> State:
        return value * 1, value * 1


def unrolled(steps: int) -> nn.Sequential:
    torch.manual_seed(0)
    cell = nn.LSTMCell(WIDTH, WIDTH)
    return nn.Sequential(_Start(), *(_Step(cell) for _ in range(steps)))


def loss_of(state: State, target: Tensor) -> Tensor:
    return (state[0] - target).square().mean()


def program_of(share: float) -> ChainProgram:
    """The program of mixed states in a share of the memory that keeps everything."""
    value = torch.zeros(SAMPLES, WIDTH)
    short = profile_layers(layers_of(unrolled(3), 0), value, value, loss_of, torch.float32)
    row = short.layers[2]
    size = -(-row.saved_bytes // row.output_bytes)
    whole = replace(short, layers=(short.layers[0], *[row] * STEPS), shared=())
    options = PolicyOptions("bptt", variant="msm", states=int(share * size * STEPS))
    (program,) = solve(whole, [(0, STEPS)], options).stages
    assert isinstance(program, tuple)
    return program


def ran(stage: StageModule, program: ChainProgram | None) -> tuple[int, int, list[Tensor]]:
    """The peak of one forward and backward, the forwards of steps, and the gradients of weights."""
    made, calls = copy.deepcopy(stage), Counter[str]()
    if program is not None:
        install(made, program)
    for layer in made.layers[1:]:
        layer.register_forward_pre_hook(lambda module, given: calls.update(["forward"]))
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    value = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    with LiveTracker() as tracker:
        torch.autograd.backward(loss_of(made(value), torch.zeros_like(value)))
    return tracker.peak, calls["forward"], [each.grad for each in made.parameters() if each.grad is not None]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_thousand_steps_of_an_lstm_in_five_percent_of_the_memory_take_a_third_more_time() -> None:
    """Published: 95 % less memory for 1.32 times the time, if a backward takes twice as long as a forward.

    States may have 3.8 % of the memory here, so that all that is counted is below 5 %: an internal state is 3.5 hidden
    ones and counts as 4, and what the step that runs needs comes besides.
    """
    program = program_of(0.0375)
    stage = build_stage(layers_of(unrolled(STEPS), 0), 0, STEPS)
    plain, once, expected = ran(stage, None)
    peak, again, found = ran(stage, program)
    assert all(map(torch.equal, found, expected))
    of_steps = [each for each in operations(program) if each.step is not Step.BACKWARD and each.layer > 0]
    assert (once, again) == (STEPS, len(of_steps))
    assert (again / STEPS + 2) / 3 == pytest.approx(1.32, abs=0.01)
    assert peak <= 0.05 * plain
