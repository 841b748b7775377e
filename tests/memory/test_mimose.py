"""Mimose: batches of varying length with the same bits, within the planned memory, and more kept for short ones."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from plan_profiles import layer
from test_budgets import SCALARS
from test_graph_programs import bench, runs_as_predicted
from torch import Tensor, nn

from runner.memory.apply.install import install
from runner.memory.solve import by_size
from runner.memory.solve.by_size import LayerBytes, PlansBySize, SizedProgram
from runner.memory.solve.program import forwards
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import StageChain
from runner.model.layers import StageModule, build_stage, layers_of
from runner.model.live_tracker import LiveTracker
from runner.plan.choices import program_cost
from runner.profiling.model import profile_layers

LONGEST, SAMPLES, WIDTH = 48, 4, 16


class _Attending(nn.Module):
    """Attention without a fused operator, so that it saves the square of the length; with dropout."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.mixed, self.wide = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, factor * WIDTH)
        self.narrow, self.dropout = nn.Linear(factor * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        query, key, given = self.mixed(value).chunk(3, dim=-1)
        weights = self.dropout(torch.softmax(query @ key.transpose(1, 2), dim=-1))
        made: Tensor = value + self.narrow(torch.tanh(self.wide(weights @ given)))
        return made


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(_Attending(factor) for factor in (1, 4, 2, 4, 1, 3)))


def batch_of(length: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(samples, length, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@cache
def chain() -> StageChain:
    sources = layers_of(make_model(), 0)
    return StageChain(profile_layers(sources, *batch_of(LONGEST), squares, torch.float32), 0, 6)


def sized(of: StageChain) -> list[SizedProgram]:
    make = STRATEGIES["mimose"].candidates
    assert make is not None
    return [each.program for each in make(of) if isinstance(each.program, SizedProgram)]


class Trained:
    """A stage that runs batch after batch; it counts forwards of layers, and notes the peak and gradients of each."""

    def __init__(self, program: SizedProgram | None) -> None:
        self.stage = build_stage(layers_of(make_model(), 0), 0, 6)
        self.calls = Counter[int]()
        if program is not None:
            install(self.stage, program)
        for index, each in enumerate(self.stage.layers):
            each.register_forward_pre_hook(lambda module, given, index=index: self.calls.update([index]))

    def step(self, length: int, samples: int = SAMPLES) -> tuple[int, list[Tensor]]:
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        inputs, targets = batch_of(length, samples)
        self.calls.clear()
        with LiveTracker() as tracker:
            torch.autograd.backward(squares(self.stage(inputs, lambda index: torch.manual_seed(index)), targets))
        found = (parameter.grad for parameter in self.stage.parameters())
        return tracker.peak, [gradient.clone() for gradient in found if gradient is not None]


LENGTHS = (LONGEST, 20, 8, 20, 40, 1, LONGEST, 37)


def test_batches_of_any_length_give_the_same_bits_within_the_predicted_peak() -> None:
    program = sized(chain())[5]
    predicted = program_cost(chain(), program).peak_bytes
    with_plan, without = Trained(program), Trained(None)
    for length in LENGTHS:
        peak, gradients = with_plan.step(length)
        expected_peak, expected = without.step(length)
        assert all(map(torch.equal, gradients, expected))
        assert peak <= predicted + SCALARS
        if length == LONGEST:
            assert 0.99 * predicted <= peak < expected_peak
            assert with_plan.calls.total() == forwards(program)


def test_a_short_batch_keeps_more_once_its_length_is_known() -> None:
    program = sized(chain())[5]
    trained = Trained(program)
    trained.step(12)
    assert trained.calls.total() == forwards(program)  # measured under the program of the largest
    trained.step(12)
    assert trained.calls.total() == len(trained.stage.layers)
    trained.step(40)
    trained.step(40)
    assert len(trained.stage.layers) < trained.calls.total() <= forwards(program)


def test_a_length_between_four_others_is_estimated() -> None:
    trained, other = Trained(sized(chain())[5]), Trained(None)
    for length in (10, 40, 24, 16):
        trained.step(length)
    for length, again in ((12, 0), (9, 6), (41, 6)):  # beyond the shortest and the longest nothing is known
        _, gradients = trained.step(length)
        assert all(map(torch.equal, gradients, other.step(length)[1]))
        assert trained.calls.total() == len(trained.stage.layers) + again
    trained.step(12, samples=2)  # another number of samples, too: no line through what is known
    assert trained.calls.total() == len(trained.stage.layers) + 6


def test_measured_bytes_are_those_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LayerBytes] = []
    program = sized(chain())[2]
    trained = Trained(program)
    monkeypatch.setattr(PlansBySize, "note", lambda self, shapes, rows: found.extend(rows))
    trained.step(LONGEST)
    for own, row in zip(found, chain().layers, strict=True):
        assert own.inner + sum(own.output.values()) == row.saved_bytes
        assert list(own.output.values()) == [each.num_bytes for each in row.output]


def known(function: object, lengths: list[int], saved: int = 10**9) -> PlansBySize:
    """Plans of a stage of which some lengths were measured; each layer saves what a function of the length says."""
    plans = PlansBySize(sized(chain())[5])
    for length in lengths:
        rows = [LayerBytes(function(length), {each.storage: 4 * SAMPLES * WIDTH * length for each in row.output})  # type: ignore[operator]
                for row in chain().layers]  # fmt: skip
        plans.note(((SAMPLES, length, WIDTH),), rows)
    return plans


def test_a_function_that_is_not_quadratic_is_not_trusted() -> None:
    lengths = [4, 8, 16, 24, 32]
    shapes = ((SAMPLES, 12, WIDTH),)
    assert known(lambda x: 7 * x * x + 3 * x, lengths).program(shapes) == sized(chain())[5].steps[0]
    largest = sized(chain())[5]
    assert known(lambda x: 2 ** (x // 2), lengths).program(shapes) == largest.steps[largest.chosen]
    assert known(lambda x: 7 * x * x, [4, 16, 24]).program(shapes) == largest.steps[largest.chosen]


@pytest.mark.parametrize("seed", range(2))
def test_an_estimate_is_a_quadratic_function_and_never_less(seed: int) -> None:
    """Three measured points make a parabola by Lagrange's formula."""
    draw = random.Random(seed)
    factors = [draw.randint(0, 20) for _ in range(3)]
    lengths = draw.sample(range(2, 48), 6)
    plans = known(lambda x: sum(factor * x**power for power, factor in enumerate(factors)), lengths)
    length = draw.randint(min(lengths), max(lengths))
    found = plans._estimated(((SAMPLES, length, WIDTH),))
    assert found is not None
    expected = sum(factor * length**power for power, factor in enumerate(factors))
    assert all(expected <= own.inner <= 1.011 * expected + 1 for own in found)


def test_a_larger_batch_than_the_planned_one_is_told() -> None:
    trained = Trained(sized(chain())[0])
    with pytest.raises(RuntimeError, match="has the shapes .* `spec` return a sample that makes the largest batch"):
        trained.step(LONGEST + 1)


def test_skips_and_batch_norms_have_the_same_bits_with_the_predicted_peak() -> None:
    programs = sized(bench("U-Net").chain)
    for program in (programs[len(programs) // 2], programs[-1]):
        runs_as_predicted("U-Net", program)


def test_losses_and_weights_are_the_same_bits_in_a_pipeline_of_varying_lengths() -> None:
    batches = [batch_of(length, 8) for length in (LONGEST, 20, 20, 33, LONGEST, 20)]

    def train(use: bool) -> tuple[object, dict[str, Tensor]]:
        def prepare(stage: StageModule, number: int) -> None:
            whole = StageChain(chain().profile, stage.first_layer, stage.last_layer, in_flight=2)
            if use:
                install(stage, sized(whole)[-2])

        return train_in_threads(
            make_model, squares, batches, pipeline=2, data=1, schedule="zb_h1", count=2,
            optimizer=partial(torch.optim.SGD, lr=0.1), prepare=prepare,
        )  # fmt: skip

    expected_losses, expected = train(False)
    losses, state = train(True)
    assert losses == expected_losses
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []


def test_the_backward_of_an_earlier_layer_may_be_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer keeps 30, and its backward has the 50 of its output's gradient and 20 of its own."""
    rows = [
        layer(saved_bytes=30, output_bytes=50, forward_transient_bytes=0, backward_transient_bytes=20),
        layer(saved_bytes=5, output_bytes=1, forward_transient_bytes=0, backward_transient_bytes=1),
    ]
    monkeypatch.setattr(by_size, "graph_rows", lambda *given: rows)
    stage: Any = SimpleNamespace(steps=[None], chosen=0, before=None, layers=(), loss=None, shared=(), first=0)
    assert PlansBySize(stage)._most == (35, 100)
