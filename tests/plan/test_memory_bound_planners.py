"""Beaumont's periods against an integer program and all cuts; EffTra against all groups; the policy's samples."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from planning_problems import cuts, figures, problem, shares
from scipy.optimize import Bounds, LinearConstraint, milp

from runner.plan.planners.orders import Orders
from runner.plan.planners.published.beaumont import shortest_period
from runner.plan.planners.published.chain import Chain
from runner.plan.planners.published.efftra import grouped, step_seconds
from runner.plan.planners.published.efftra import plan as efftra
from runner.plan.planners.published.rl import learn
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Line, Order, PlanningProblem


def periodic(loads: list[tuple[float, float]], saved: list[float], rooms: list[float], period: float) -> bool:
    """Whether forwards and backwards of a chain of resources repeat in a period, each with room for what it keeps.

    Starts within the period and shifts by whole periods, as the paper's integer program has them. A resource is a
    stage or the link behind it, which keeps nothing.
    """
    num = len(loads)
    ops = [*range(num), *reversed(range(num))]  # the chain F_1 .. F_n, B_n .. B_1, by resource
    long = [*(f for f, _ in loads), *(b for _, b in reversed(loads))]
    starts, shifts, turns, held = (range(at, at + 2 * num) for at in (0, 2 * num, 4 * num, 5 * num))
    size = 6 * num
    rows, low = list[np.ndarray](), list[float]()

    def at_least(parts: dict[int, float], least: float) -> None:
        row = np.zeros(size)
        for place, factor in parts.items():
            row[place] += factor
        rows.append(row)
        low.append(least)

    for op in range(2 * num - 1):
        at_least({starts[op + 1]: 1, shifts[op + 1]: period, starts[op]: -1, shifts[op]: -period}, long[op])
    for one in range(num):
        two = 2 * num - 1 - one
        assert ops[one] == ops[two]
        at_least({starts[two]: 1, starts[one]: -1, turns[one]: -period}, long[one] - period)
        at_least({starts[one]: 1, starts[two]: -1, turns[one]: period}, long[two])
        # As many are kept as forwards begin until the backward of the first has ended.
        at_least(
            {held[one]: period, starts[two]: -1, starts[one]: 1, shifts[two]: -period, shifts[one]: period}, long[two]
        )
        at_least({held[one]: -saved[one]}, -rooms[one])
    upper = np.array([period] * (2 * num) + [4 * num] * (2 * num) + [1] * num + [4 * num] * num, dtype=float)
    whole = np.array([0] * (2 * num) + [1] * (4 * num))
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
