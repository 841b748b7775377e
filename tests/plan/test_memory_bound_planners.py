"""Beaumont's periods against an integer program and all cuts; EffTra against all groups; the policy's samples."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, groupby, pairwise, product
from typing import Any

import numpy as np
import pytest
from planning_problems import cuts, figures, problem, shares
from scipy.optimize import Bounds, LinearConstraint, milp

from runner.plan.memory.predict import in_flight_microbatches
from runner.plan.planners.orders import Orders
from runner.plan.planners.published.beaumont import parted, shortest_period
from runner.plan.planners.published.chain import Chain
from runner.plan.planners.published.efftra import grouped, step_seconds
from runner.plan.planners.published.efftra import plan as efftra
from runner.plan.planners.published.periodic import Placed, pattern_for, shortest_pattern
from runner.plan.planners.published.rl import learn
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Line, Order, PlanningProblem
from runner.schedule.catalogue.registry import build
from runner.schedule.checking.schedule import check
from runner.schedule.simulation.clock import StageCosts, simulate


def periodic(
    loads: list[tuple[float, float]],
    saved: list[float],
    rooms: list[float],
    period: float,
    where: list[int] | None = None,
) -> bool:
    """Whether forwards and backwards of a chain of resources repeat in a period, each with room for what it keeps.

    Starts within the period and shifts by whole periods, as the paper's integer program has them. A resource is a
    stage or the link behind it, which keeps nothing; with ``where``, several of the chain are one, whose room is that
    of the first. No two actions of a resource may meet.
    """
    num = len(loads)
    own = list(range(num)) if where is None else where
    ops = [*range(num), *reversed(range(num))]  # the chain F_1 .. F_n, B_n .. B_1, by resource
    long = [*(f for f, _ in loads), *(b for _, b in reversed(loads))]
    meeting = [(one, two) for one, two in combinations(range(2 * num), 2) if own[ops[one]] == own[ops[two]]]
    starts, shifts, held = range(2 * num), range(2 * num, 4 * num), range(4 * num, 5 * num)
    size = 5 * num + len(meeting)
    rows, low = list[np.ndarray](), list[float]()

    def at_least(parts: dict[int, float], least: float) -> None:
        row = np.zeros(size)
        for place, factor in parts.items():
            row[place] += factor
        rows.append(row)
        low.append(least)

    for op in range(2 * num - 1):
        at_least({starts[op + 1]: 1, shifts[op + 1]: period, starts[op]: -1, shifts[op]: -period}, long[op])
    for turn, (one, two) in enumerate(meeting, 5 * num):
        at_least({starts[two]: 1, starts[one]: -1, turn: -period}, long[one] - period)
        at_least({starts[one]: 1, starts[two]: -1, turn: period}, long[two])
    for one in range(num):
        two = 2 * num - 1 - one
        # As many are kept as forwards begin until the backward of the first has ended.
        at_least(
            {held[one]: period, starts[two]: -1, starts[one]: 1, shifts[two]: -period, shifts[one]: period}, long[two]
        )
        at_least({held[each]: -saved[each] for each in range(num) if own[each] == own[one]}, -rooms[one])
    upper = np.array([period] * (2 * num) + [4 * num] * (3 * num) + [1] * len(meeting), dtype=float)
    whole = np.array([0] * (2 * num) + [1] * (size - 2 * num))
    made = milp(
        np.zeros(size),
        constraints=LinearConstraint(np.array(rows), low, np.inf),
        integrality=whole,
        bounds=Bounds(0, upper),
    )
    return made.x is not None


def resources(
    of: PlanningProblem, ranges: list[tuple[int, int]], samples: float
) -> tuple[list[tuple[float, float]], list[float], list[float]]:
    """Seconds of each stage and of the link behind it, what a micro-batch keeps there, and the room for it."""
    rows, division = figures(of, samples), of.divisions[0]
    loads, saved, rooms = list[tuple[float, float]](), list[float](), list[float]()
    for first, end in ranges:
        forward = sum(line.of(samples) for line in division.forward[first:end])
        loads.append((forward, sum(row[0] for row in rows[first:end]) - forward))
        saved.append(samples * sum(line.each for line in division.kept[0].saved[first:end]))
        rooms.append(of.memory[of.ranks] - 4 * sum(row[1] for row in rows[first:end]) - samples * 0.1)
        if end < len(of.layers):
            loads.append((rows[end - 1][2], rows[end - 1][2]))
            saved.append(0.0)
            rooms.append(1.0)
    return loads, saved, rooms


@pytest.mark.parametrize("seed", range(20))
def test_beaumonts_period_is_that_of_the_integer_program(seed: int) -> None:
    of = problem(seed, layers=5)
    kept = replace(of.divisions[0].kept[0], saved=tuple(Line(0.0, 1.0 + at) for at in range(5)))
    of = replace(of, divisions=(replace(of.divisions[0], kept=(kept,)),), memory={4: 25 + 3 * (seed % 7)})
    stages = 2 + seed % 2
    found = shortest_period(Chain(of, of.divisions[0], 1.0), stages)
    every = [ranges for ranges in cuts(5) if len(ranges) == stages]
    if found is None:
        loose = 10 * sum(sum(each) for each in resources(of, every[0], 1.0)[0])
        assert not any(periodic(*resources(of, ranges, 1.0), loose) for ranges in every)
        return
    own = [(first, last + 1) for first, last in found[1]]
    assert periodic(*resources(of, own, 1.0), found[0] * (1 + 1e-5))
    assert not any(periodic(*resources(of, ranges, 1.0), found[0] * (1 - 1e-3)) for ranges in every)


def as_resources(stages: list[Placed], rooms: list[float]) -> tuple[Any, ...]:
    """The same of stages on ranks that hold several, and of links between two ranks, for :func:`periodic`."""
    loads, saved, room, where = list[tuple[float, float]](), list[float](), list[float](), list[int]()
    links: dict[tuple[int, ...], int] = {}
    for each, after in zip(stages, [*stages[1:], None], strict=True):
        loads.append((each.forward, each.backward))
        saved.append(each.saved)
        room.append(rooms[each.rank])
        where.append(each.rank)
        if after is not None and each.message:
            pair = tuple(sorted((each.rank, after.rank)))
            where.append(links.setdefault(pair, len(rooms) + len(links)))
            loads.append((each.message, each.message))
            saved.append(0.0)
            room.append(1.0)
    return loads, saved, room, where


def drawn_stages(draw: random.Random) -> tuple[list[Placed], list[float]]:
    """Three to six stages on two or three ranks, of which neighbours are on different ones."""
    ranks, owners = draw.choice([2, 3]), list[int]()
    size = draw.randint(3, 3 + ranks)
    while len(set(owners)) < ranks or any(one == other for one, other in pairwise(owners)):
        owners = [draw.randrange(ranks) for _ in range(size)]
    sent, last = draw.random() < 0.5, len(owners) - 1
    stages = [
        Placed(
            rank,
            draw.uniform(1, 3),
            draw.uniform(1, 4),
            draw.uniform(1, 3),
            draw.uniform(0.1, 2.0) if sent and at < last else 0.0,
        )
        for at, rank in enumerate(owners)
    ]
    return stages, [
        draw.uniform(1.0, 2.5) * sum(each.saved for each in stages if each.rank == rank) for rank in range(ranks)
    ]


def load_of(stages: list[Placed]) -> float:
    """Seconds of a micro-batch on the busiest rank."""
    return max(sum(each.forward + each.backward for each in stages if each.rank == rank) for rank in range(3))


@pytest.mark.parametrize("seed", range(25))
def test_patterns_of_ranks_with_several_stages_are_those_of_the_integer_program(seed: int) -> None:
    stages, rooms = drawn_stages(random.Random(seed))
    loads, saved, room, where = as_resources(stages, rooms)
    for longer in (1.001, 1.1, 1.3, 1.8):
        period = longer * load_of(stages)
        found = pattern_for(stages, rooms, period)
        assert (found is not None) == periodic(loads, saved, room, period, where)


@pytest.mark.parametrize("seed", range(25))
def test_a_pattern_is_played_in_its_period_and_keeps_what_it_says(seed: int) -> None:
    """Each further micro-batch takes at most a period, and no stage keeps more between its forwards and backwards."""
    stages, rooms = drawn_stages(random.Random(seed))
    silent = [each._replace(message=0.0) for each in stages]
    found = shortest_pattern(silent, rooms, 10 * load_of(stages))
    if found is None:
        return
    periods = [start / found.period for start in found.starts]
    owners = [each.rank for each in silent]
    f, b = tuple(each.forward for each in silent), tuple(each.backward for each in silent)
    spans = []
    for count in (10, 20):
        schedule = build("1f1b", len(rooms), count, placement=owners, starts=periods)
        assert check(schedule) == []
        spans.append(simulate(schedule, StageCosts(f, b, b, b)).makespan)
        assert in_flight_microbatches(schedule) == found.kept
    assert spans[0] <= found.starts[-1] + b[0] + 9 * found.period * (1 + 1e-7)
    assert spans[1] - spans[0] <= 10 * found.period * (1 + 1e-7)
    for rank, room in enumerate(rooms):
        assert (
            sum(most * each.saved for most, each in zip(found.kept, silent, strict=True) if each.rank == rank) <= room
        )


@pytest.mark.parametrize(
    ("layers", "ranks", "seed"), [*((5, 2, seed) for seed in range(8)), (4, 3, 0), (5, 3, 1), (6, 3, 2)]
)
def test_beaumonts_stages_that_are_apart_are_the_best_of_all_assignments(layers: int, ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    of = problem(seed, layers=layers, ranks=ranks)
    division = of.divisions[0]
    saved = tuple(Line(0.0, draw.uniform(0.5, 4.0)) for _ in range(layers))
    division = replace(
        division,
        boundary=tuple(each / 10 for each in division.boundary),
        kept=(replace(division.kept[0], saved=saved),),
    )
    room = int(4.4 * sum(division.weight) / ranks + draw.uniform(0.9, 1.5) * sum(each.each for each in saved))
    of = replace(of, divisions=(division,), memory={ranks: room})
    chain = Chain(of, division, 1.0)
    together = shortest_period(chain, ranks)
    found = parted(chain, ranks, together[0] if together is not None else None)
    best = found[0] if found is not None else together[0] if together is not None else 1e3
    rows = figures(of, 1.0)
    for owners in product(range(ranks), repeat=layers):
        if owners[0] or len({*owners}) < ranks:  # ranks are alike
            continue
        runs = [[at for at, _ in run] for _, run in groupby(enumerate(owners), lambda each: each[1])]
        stages = [
            Placed(
                owners[own[0]],
                forward := sum(division.forward[at].of(1.0) for at in own),
                sum(rows[at][0] for at in own) - forward,
                sum(saved[at].each for at in own),
                rows[own[-1]][2] if own[-1] + 1 < layers else 0.0,
            )
            for own in runs
        ]
        if load_of(stages) > best * (1 - 2e-3):
            continue
        weights = [4 * sum(rows[at][1] for at in range(layers) if owners[at] == rank) for rank in range(ranks)]
        loads, kept, rooms, where = as_resources(stages, [room - 0.1 - each for each in weights])
        assert not periodic(loads, kept, rooms, best * (1 - 2e-3), where)
        if found is not None and found[1:3] == (
            tuple((own[0], own[-1]) for own in runs),
            tuple(each.rank for each in stages),
        ):
            assert periodic(loads, kept, rooms, best * (1 + 1e-5), where)


@pytest.mark.parametrize("seed", range(8))
def test_efftras_groups_are_the_least_slowest_and_never_worse_than_either_extreme(seed: int) -> None:
    of = problem(seed, layers=5)
    rows, count = figures(of, 1.0), 8

    def times(ranges: list[tuple[int, int]], own: tuple[int, ...]) -> tuple[list[float], list[float], list[float]]:
        compute = [sum(row[0] for row in rows[a:b]) / m for m, (a, b) in zip(own, ranges, strict=True)]
        sums = [2 * (m - 1) / m * sum(row[1] for row in rows[a:b]) / 4.0 for m, (a, b) in zip(own, ranges, strict=True)]
        return compute, sums, [2 * rows[b - 1][2] for _, b in ranges[:-1]]

    def length(ranges: list[tuple[int, int]], own: tuple[int, ...]) -> float:
        compute, sums, sent = times(ranges, own)
        return sum(compute) + sum(sent) + (count - 1) * max([*compute, *sent]) + max(sums)

    slowest, chain = list[float](), Chain(of, of.divisions[0], 1.0)
    for ranges in cuts(5):
        for own in shares(len(ranges), 4) if len(ranges) <= 4 else ():
            compute, sums, sent = times(ranges, own)
            slowest.append(max([*(c + s / count for c, s in zip(compute, sums, strict=True)), *sent]))
    stages, replicas = grouped(chain, 4, count)
    ranges = [(first, last + 1) for first, last in stages]
    compute, sums, sent = times(ranges, replicas)
    assert max([*(c + s / count for c, s in zip(compute, sums, strict=True)), *sent]) == pytest.approx(min(slowest))
    assert step_seconds(chain, stages, replicas, count) == pytest.approx(length(ranges, replicas))
    answer = efftra(of)
    evened = min((list(each) for each in cuts(5) if len(each) == 4), key=lambda each: max(times(each, (1,) * 4)[0]))
    assert answer.seconds <= min(length([(0, 5)], (4,)), length(evened, (1,) * 4)) * (1 + 1e-12)


def test_the_policy_samples_near_the_best_cut_and_its_choice_improves_on_what_it_drew_first() -> None:
    hits, better = 0, 0
    for seed in range(6):
        of = problem(seed, layers=10)
        order = Orders().of(Order("1f1b", 1), 3, 8)
        assert order is not None
        table = StageTable(of, Setting(of.divisions[0], 1.0, 8, 1, None))
        every = [(0, *inner, 10) for inner in combinations(range(1, 10), 2)]
        whole = np.array(every, dtype=np.int64).T
        seconds = table.step_seconds(Candidates(whole, np.zeros((3, len(every)), dtype=np.int64)), order)
        learned = learn(table, order, of.memory[4], 60)
        assert learned == learn(table, order, of.memory[4], 60), "seeded"
        assert learned.best is not None
        assert learned.samples == len(learned.history) == 16 * 60
        assert learned.best[1] == seconds[every.index((0, learned.best[0][1], learned.best[0][2], 10))]
        assert all(a < b for a, b in pairwise(learned.best[0]))
        hits += learned.best[1] <= seconds.min() * 1.05
        first = [each for each in learned.history[:16] if np.isfinite(each)]
        better += learned.own is not None and learned.own[1] <= sum(first) / len(first)
    assert hits == 6
    assert better >= 5


def test_the_policy_takes_no_cut_that_does_not_fit() -> None:
    of = problem(1, layers=6)
    order = Orders().of(Order("1f1b", 1), 2, 4)
    assert order is not None
    table = StageTable(of, Setting(of.divisions[0], 1.0, 4, 1, None))
    assert learn(table, order, 0.0, 5).best is None
    cut = np.array([[0], [3], [6]], dtype=np.int64)
    limit = float(table.peaks(Candidates(cut, np.zeros((2, 1), dtype=np.int64)), order).max())
    learned = learn(table, order, limit, 40)
    assert learned.best is not None
    found = np.array([[*learned.best[0], 6]], dtype=np.int64).T
    assert float(table.peaks(Candidates(found, np.zeros((2, 1), dtype=np.int64)), order).max()) <= limit
