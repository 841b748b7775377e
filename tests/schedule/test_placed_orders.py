"""Orders of 1f1b with a placement: which lists its patterns make, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner.schedule.catalogue import registry
from runner.schedule.checking.program import check_program
from runner.schedule.checking.schedule import check
from runner.schedule.generators.placed import found_starts
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import StageCosts, simulate
from runner.schedule.values import Op


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 6), (5, 3), (5, 12)])
def test_one_stage_on_each_rank_is_1f1b(ranks: int, microbatches: int) -> None:
    plain = registry.build("1f1b", ranks=ranks, microbatches=microbatches)
    assert registry.build("1f1b", ranks=ranks, microbatches=microbatches, placement=list(range(ranks))) == plain


@pytest.mark.parametrize("seed", range(20))
def test_any_placement_can_run_in_the_order_of_any_growing_starts(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    owners = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randint(0, 4)))]
    draw.shuffle(owners)
    given = [None, sorted(draw.uniform(0, 5) for _ in range(2 * len(owners)))]
    for starts in given:
        schedule = registry.build("1f1b", ranks=ranks, microbatches=7, placement=owners, starts=starts)
        assert check(schedule) == []
        assert check_program(lower(schedule)) == []
        assert schedule.placement == (tuple(owners),)
        for stage, rank in enumerate(owners):
            for op in (Op.F, Op.B):
                own = [each.microbatch for each in schedule.actions[rank] if (each.op, each.stage) == (op, stage)]
                assert own == list(range(7)), "sums of gradients depend on this order"


@pytest.mark.parametrize(
    ("owners", "period"), [([0, 1, 0], 4), ([0, 1, 2, 0, 1], 4), ([0, 0, 1], 4), ([1, 0, 1, 0, 1], 6)]
)
def test_found_starts_repeat_in_the_time_of_the_busiest_rank(owners: list[int], period: int) -> None:
    """If all actions take 1, each further micro-batch takes what the rank with most stages needs for it."""
    assert found_starts(owners)[: len(owners)] == [stage / period for stage in range(len(owners))]
    ones = (1.0,) * len(owners)
    spans = [
        simulate(
            registry.build("1f1b", ranks=max(owners) + 1, microbatches=count, placement=owners),
            StageCosts(ones, ones, ones, ones),
        ).makespan
        for count in (8, 18)
    ]
    assert spans[1] - spans[0] == pytest.approx(10 * period)


_STARTS = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "asked", "path", "fix"),
    [
        ("1f1b", {"placement": [0, 2]}, "schedule.placement", "schedule.placement=[0,1]"),
        ("1f1b", {"placement": []}, "schedule.placement", "schedule.placement=[0,1]"),
        ("1f1b", {"placement": [0, 1, -1]}, "schedule.placement", "schedule.placement=[0,1]"),
        ("1f1b", {"placement": [0, 2, 1]}, "schedule.placement", "parallelism.pipeline=3"),
        ("1f1b", {"placement": [0, 1], "shares": [1, 1, 2, 2]}, "schedule.placement", "schedule.placement=null"),
        ("1f1b", {"placement": [0, 1], "replicas": [1, 1]}, "schedule.placement", "schedule.placement=null"),
        ("1f1b", {"placement": [0, 1], "starts": _STARTS[:3]}, "schedule.starts", "schedule.starts=null"),
        ("1f1b", {"placement": [0, 1], "starts": [0, 1, 1, 2]}, "schedule.starts", "schedule.starts=null"),
        ("1f1b", {"placement": [0, 1], "starts": [0, 1, 2, float("inf")]}, "schedule.starts", "schedule.starts=null"),
        ("1f1b", {"starts": _STARTS}, "schedule.starts", "schedule.starts=null"),
        ("gpipe", {"placement": [0, 1]}, "schedule.placement", "schedule.placement=null"),
    ],
)
def test_what_is_refused(name: str, asked: dict[str, Any], path: str, fix: str) -> None:
    (problem,) = registry.problems_of(name, ranks=2, microbatches=4, **asked)
    assert (problem.path, problem.fix) == (path, fix)
