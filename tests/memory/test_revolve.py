"""Binomial checkpointing: the published counts, the same bits, the predicted peak, and what is refused."""

from __future__ import annotations

from functools import cache
from math import comb, inf

import pytest
import torch
from layouts import uniform
from plan_profiles import layer, model
from programs import chains, count_forwards, make_blocks

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.memory.apply.install import install
from runner.memory.solve.policies import solve
from runner.memory.solve.program import Step, forwards, operations
from runner.memory.solve.values import ChainProgram, PolicyOptions
from runner.model.layers import StageModule, layers_of
from runner.plan.make import make_plan


@cache
def fewest(length: int, slots: int) -> float:
    """Forwards besides those that keep a graph: the recursion over where the next state is kept."""
    if length == 1:
        return 0
    if slots == 0:
        return inf
    return min(k + fewest(length - k, slots - 1) + fewest(k, slots) for k in range(1, length))


def closed_form(length: int, slots: int) -> int:
    """Griewank and Walther 2000: r l - C(s + r, r - 1) with the least r for which C(s + r, s) >= l."""
    r = 0
    while comb(slots + r, slots) < length:
        r += 1
    return r * length - (comb(slots + r, r - 1) if r else 0)


def programs(layers: int, slots: int, ranks: int = 1) -> tuple[ChainProgram, ...]:
    profile = model([layer()] * layers)
    return chains(solve(profile, uniform(layers, ranks), PolicyOptions("revolve", slots=slots)))


def test_the_closed_form_is_the_least_of_all_splits_and_the_program_reaches_it() -> None:
    for length in range(1, 61):
        for slots in range(1, 11):
            told = closed_form(length, slots)
            assert told == fewest(length, slots)
            assert forwards(programs(length, slots)[0]) == told + length


@pytest.mark.parametrize(("length", "slots", "left"), [(10, 3, 4), (20, 3, 10), (35, 3, 20), (56, 5, 21)])
def test_splits_that_are_unique(length: int, slots: int, left: int) -> None:
    assert programs(length, slots)[0][0].last + 1 == left


def most_kept(program: ChainProgram, kept: int = 0) -> int:
    """Inputs that are kept at once, at most; one layer's graph stands on its own input, which may be no kept one."""
    most = kept
    for segment in program:
        kept += segment.recompute
        most = max(most, kept)
    for segment in reversed(program):
        if segment.recompute:
            most = max(most, most_kept(segment.inside, kept - 1))
            kept -= 1
    return most


def test_no_more_inputs_are_kept_than_there_are_slots() -> None:
    assert all(most_kept(programs(length, slots)[0]) <= slots for length in range(1, 40) for slots in range(1, 7))


def test_every_layer_goes_back_once_from_the_last_to_the_first() -> None:
    steps = list(operations(programs(20, 3)[0]))
    assert [each.layer for each in steps if each.step is Step.BACKWARD] == [*reversed(range(20))]
    graphs = [each.layer for each in steps if each.step is Step.FORWARD_WITH_GRAPH]
    assert graphs == [*reversed(range(20))]  # one layer's graph at a time


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_forwards_of_a_run_are_those_of_the_formula(slots: int) -> None:
    for length in range(1, 21):
        counted = count_forwards(length, programs(length, slots)[0])
        assert counted.total() == closed_form(length, slots) + length


@pytest.mark.parametrize("deep", [4, 12])
def test_without_seeds_random_layers_draw_the_same(deep: int) -> None:
    """A stage of a user's own loop: the generator's state is kept and restored at every depth."""

    def gradients(slots: int | None) -> list[torch.Tensor]:
        stage = StageModule(layers_of(make_blocks(deep, 8, 0.3), 0))
        if slots is not None:
            install(stage, programs(deep, slots)[0])
        torch.manual_seed(1)
        stage(torch.ones(5, 8)).square().sum().backward()
        drawn = torch.rand(1)
        return [*(parameter.grad for parameter in stage.parameters() if parameter.grad is not None), drawn]

    expected = gradients(None)
    for slots in (1, 2, 3):
        found = gradients(slots)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_a_plan_knows_its_bytes_and_seconds() -> None:
    chain = model([layer(saves_output=False, unsaved_forward_bytes=14)] * 10)
    plain, few, many = (
        make_plan(resolve(["model=mlp", "optimizer=sgd", "data.batch_size=1", *words]), chain)
        for words in (
            [],
            ["activation_checkpoint=revolve", "activation_checkpoint.slots=2"],
            ["activation_checkpoint=revolve", "activation_checkpoint.slots=4"],
        )
    )
    assert few.time.step_seconds == plain.time.step_seconds + closed_form(10, 2)
    assert many.time.step_seconds == plain.time.step_seconds + closed_form(10, 4)
    peaks = [plan.peak_memory_bytes[0] for plan in (few, many, plain)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("varuna", "runs whole stages forward again by itself"),
        ("bpipe", "which these policies make anew"),
    ],
)
def test_schedules_that_refuse_the_others_refuse_it(schedule: str, why: str) -> None:
    words = ["parallelism.pipeline=4", "schedule.microbatches=8", f"schedule={schedule}"]
    config = resolve(["model=mlp", "activation_checkpoint=revolve", "activation_checkpoint.slots=2", *words])
    with pytest.raises(RequestError) as caught:
        make_plan(config, model([layer()] * 8))
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == ("activation_checkpoint", "activation_checkpoint=none")
    assert why in problem.why


def test_a_chain_that_would_nest_deeper_than_a_stack_is_refused() -> None:
    config = resolve(["model=mlp", "activation_checkpoint=revolve", "activation_checkpoint.slots=1"])
    with pytest.raises(RequestError, match=r"activation_checkpoint = revolve: must put at most 64 .* Stage 0 has more"):
        make_plan(config, model([layer()] * 400))
