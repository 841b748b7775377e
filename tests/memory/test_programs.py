"""Programs that re-enter layers: what they do step by step is what runs, with the same bits and the predicted peak."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
import torch
from layouts import uniform
from plan_profiles import layer, model
from programs import count_forwards, make_blocks, points, train_under
from torch import nn

from runner.config.compose.groups import options, shipped_conf
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.program import Step, check_program, depth, forwards, operations, reruns
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import ActivationPlan, ChainProgram, Segment

AGAIN = partial(Segment, recompute=True)


def some_program(generator: random.Random, first: int, last: int, deep: int = 3) -> ChainProgram:
    """Any program: segments of any length, kept or computed again, by any program inside."""
    program = []
    while first <= last:
        end = generator.randint(first, last)
        again = deep > 0 and generator.random() < 0.7
        inside = some_program(generator, first, end, deep - 1) if again and generator.random() < 0.7 else ()
        program.append(Segment(first, end, recompute=again, inside=inside))
        first = end + 1
    return tuple(program)


PROGRAMS = [some_program(random.Random(seed), 0, 7) for seed in range(12)]


def test_every_strategy_has_an_option_file_and_says_what_it_is() -> None:
    shipped = options("activation_checkpoint", (shipped_conf(),))
    assert set(shipped) == {*STRATEGIES, "custom"}
    assert all(strategy.about and (strategy.source or name == "none") for name, strategy in STRATEGIES.items())


def test_a_program_step_by_step() -> None:
    program = (AGAIN(0, 2, inside=(AGAIN(0, 1), Segment(2, 2))), Segment(3, 3))
    told = " ".join(f"{each.step.value}{each.layer}" for each in operations(program))
    assert told == "Fck0 Fno1 Fno2 Fall3 B3 Fck0 Fno1 Fall2 B2 Fall0 Fall1 B1 B0"
    assert reruns(program[0]) == Counter({0: 2, 1: 2, 2: 1})
    assert (forwards(program), depth(program)) == (9, 2)


def test_the_last_segment_inside_is_not_run_for_an_output_that_nobody_needs() -> None:
    program = (AGAIN(0, 3, inside=(AGAIN(0, 1), AGAIN(2, 3))),)
    assert reruns(program[0]) == Counter({0: 2, 1: 2, 2: 1, 3: 1})
    assert count_forwards(4, program) == Counter({0: 3, 1: 3, 2: 2, 3: 2})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_layer_runs_as_often_as_the_steps_say(program: ChainProgram) -> None:
    steps = Counter(each.layer for each in operations(program) if each.step is not Step.BACKWARD)
    assert count_forwards(8, program) == steps


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_backward_costs_its_own_and_every_forward_in_it(program: ChainProgram) -> None:
    (rows,) = [adjusted(model([layer()] * 8), ActivationPlan((program,))).layers]
    steps = Counter(each.layer for each in operations(program) if each.step is not Step.BACKWARD)
    assert [row.backward_seconds for row in rows] == [2.0 + (steps[at] - 1) * 1.0 for at in range(8)]
    assert [row.backward_flops for row in rows] == [200.0 + (steps[at] - 1) * 100.0 for at in range(8)]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ((Segment(0, 1), Segment(3, 3)), "layer 2 is next"),
        ((Segment(0, 2),), "ends before layer 3"),
        ((Segment(0, 4),), "ends before layer 5"),
        ((), "ends before layer 0"),
        ((Segment(0, 3, inside=(Segment(0, 3),)),), "not wholly computed again"),
        ((AGAIN(0, 3, inside=(Segment(0, 2),)),), "ends before layer 3 of 0 .. 3"),
        ((AGAIN(0, 3, inside=(AGAIN(0, 3, save_ops="matmuls"),)),), "operators are chosen inside"),
    ],
)
def test_what_is_no_program(program: ChainProgram, words: str) -> None:
    wrong = check_program(program, 0, 3)
    assert wrong is not None
    assert words in wrong
    assert all(check_program(each, 0, 7) is None for each in PROGRAMS)


def test_any_program_gives_the_same_bits_with_the_predicted_peak() -> None:
    generator = random.Random(1)
    programs = [some_program(generator, first, last) for first, last in uniform(10, 2)]
    kept = [(Segment(first, last),) for first, last in uniform(10, 2)]
    found, plain = (
        train_under(make_blocks, nn.functional.mse_loss, points(128), each, "1f1b") for each in (programs, kept)
    )
    assert found.losses == plain.losses
    assert [name for name in plain.weights if not torch.equal(found.weights[name], plain.weights[name])] == []
    assert found.peaks == pytest.approx(found.predicted, rel=0.05)
