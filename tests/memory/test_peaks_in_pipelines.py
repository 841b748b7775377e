"""Predicted peaks of the stages of the rematerialization recipe's models, rank by rank.

Some hand skip connections on: gradients that the next stage has sent are not freed. Where the backward is in two parts,
the second one keeps outputs of layers alive.
"""

from __future__ import annotations

from functools import cache

import pytest
from layouts import uniform
from programs import measured_and_predicted
from test_budgets import SCALARS
from test_five_models import make, profile, programs, task

from runner.memory.solve.evicting import EvictingProgram
from runner.memory.solve.policies import strategy_of
from runner.memory.solve.values import GraphProgram, PolicyOptions, Program, Segment, StageChain
from runner.schedule import build
from runner.schedule.lending import Loan, with_loans
from runner.schedule.values import Schedule

LAYERS, LAST = 9, 4  # of both models, and of the first of two stages


@cache
def of_first(name: str, strategy: str, **options: object) -> tuple[Program, ...]:
    """The programs that a strategy offers to a model's first stage."""
    candidates = strategy_of(PolicyOptions(strategy)).candidates
    assert candidates is not None
    chain = StageChain(profile(name), 0, LAST, options, in_flight=2)
    return tuple(dict.fromkeys(each.program for each in candidates(chain)))


def compared(name: str, program: Program, schedule: str = "1f1b") -> tuple[int, int]:
    """The first rank's peak, and the predicted one."""
    stages = program, (Segment(LAST + 1, LAYERS - 1),)
    found, told = measured_and_predicted(lambda: make(name), task(name).loss, task(name).batch, stages, schedule)
    return found[0], told[0]


def test_a_graph_program_of_a_stage_that_hands_skips_on() -> None:
    for program in [each for each in of_first("U-Net", "kusumoto") if isinstance(each, GraphProgram)][:2]:
        found, told = compared("U-Net", program)
        assert found <= told + SCALARS
        assert told <= 1.01 * found


@pytest.mark.parametrize("strategy", ["rotor", "full"])
def test_a_chain_program_of_a_stage_that_hands_skips_on(strategy: str) -> None:
    """The gradients that it makes itself are freed, while those of its caller stay."""
    found, told = compared("U-Net", of_first("U-Net", strategy)[-1])
    assert found <= told + SCALARS
    assert told <= 1.001 * found


def ranks_as_predicted(name: str, pipeline: int, schedule: str | Schedule, strategy: str, count: int = 4) -> None:
    """The peaks of all ranks beside the predicted ones, with so many micro-batches."""
    whole = tuple((Segment(first, last),) for first, last in uniform(len(profile(name).layers), pipeline))
    stages = whole if strategy == "none" else programs(name, strategy, pipeline)
    found, told = measured_and_predicted(lambda: make(name), task(name).loss, task(name).batch, stages, schedule, count)
    assert all(real <= said + SCALARS for real, said in zip(found, told, strict=True))
    assert all(said <= 1.005 * real for real, said in zip(found, told, strict=True))


@pytest.mark.parametrize(("name", "strategy"), [("U-Net", "none"), ("U-Net", "rotor"), ("ruDALL-E", "full")])
def test_the_peaks_of_a_backward_in_two_parts(name: str, strategy: str) -> None:
    """What W needs of a layer's output is there while the layer runs; pieces of weights wait for no product."""
    ranks_as_predicted(name, 4, "zb_h1", strategy)


def test_copies_of_statistics_stay_where_a_rank_lends_what_it_saves() -> None:
    order = with_loans(build("gpipe", ranks=4, microbatches=8), [Loan(0, 2, 3), Loan(1, 3, 2)])
    ranks_as_predicted("ResNet", 4, order, "full", count=8)


def test_a_gradient_leaves_without_the_memory_beside_it() -> None:
    """With one sample, the gradient of a concatenated skip is a part of the whole that is contiguous."""
    ranks_as_predicted("U-Net", 4, "1f1b", "none", count=8)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["none", "full", "rotor"])
@pytest.mark.parametrize(("pipeline", "schedule"), [(2, "1f1b"), (4, "1f1b"), (2, "zb_h1"), (4, "zb_h1")])
@pytest.mark.parametrize("name", ["U-Net", "ResNet", "GPT", "ruDALL-E"])
def test_the_peaks_of_all_ranks(name: str, pipeline: int, schedule: str, strategy: str) -> None:
    ranks_as_predicted(name, pipeline, schedule, strategy)


@pytest.mark.parametrize(
    ("name", "schedule", "every"),
    [("U-Net", "1f1b", 6), pytest.param("ResNet", "zb_h1", 3, marks=pytest.mark.full)],
)
def test_a_pool_that_micro_batches_share_is_a_bound(name: str, schedule: str, every: int) -> None:
    """The stage's outputs are there besides it, and what a backward frees of it is filled again."""
    programs = [each for each in of_first(name, "dtr", online=True) if isinstance(each, EvictingProgram)]
    assert len(programs) > every
    for program in programs[every // 2 :: every]:
        found, told = compared(name, program, schedule)
        assert found <= told + SCALARS
        assert told <= 1.15 * found
