"""Planners that play orders: AutoPipe's cut against all cuts, Chimera's choice against its own enumeration."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from planning_problems import figures, problem

from runner.plan.planners.orders import Orders
from runner.plan.planners.published.autopipe import best_cut, halved, length, master_stage, sliced
from runner.plan.planners.published.chain import Chain
from runner.plan.planners.published.chimera import on_the_path
from runner.plan.planners.published.chimera import plan as chimera
from runner.plan.planners.values import Line, Order, PlanningProblem
from runner.schedule.catalogue.registry import SPECS, build
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.simulation.clock import Costs, StageCosts, simulate


def played(forward: list[float], backward: list[float], count: int) -> float:
    """Seconds of 1F1B, by what each action waits for."""
    stages = len(forward)

    def turns(stage: int) -> list[tuple[str, int]]:
        warm = min(stages - stage, count)
        made = [("F", m) for m in range(warm)]
        for m in range(count):
            made += [("B", m), *([("F", m + warm)] if m + warm < count else [])]
        return made

    before = {(kind, stage, m): last for stage in range(stages) for last, (kind, m) in pairs(turns(stage))}

    @cache
    def end(kind: str, stage: int, m: int) -> float:
        own = before[kind, stage, m]
        waits = [end(own[0], stage, own[1])] if own is not None else [0.0]
        if kind == "F" and stage > 0:
            waits.append(end("F", stage - 1, m))
        if kind == "B":
            waits.append(end("B", stage + 1, m) if stage + 1 < stages else end("F", stage, m))
        return max(waits) + (forward if kind == "F" else backward)[stage]

    return max(end("B", stage, count - 1) for stage in range(stages))


def pairs(turns: list[tuple[str, int]]) -> list[tuple[tuple[str, int] | None, tuple[str, int]]]:
    return list(zip([None, *turns[:-1]], turns, strict=True))


def drawn_chain(seed: int, layers: int) -> Chain:
    of = problem(seed, layers=layers)
    draw = random.Random(seed)
    lines = tuple(Line(0.0, draw.uniform(0.3, 3.0)) for _ in range(layers))
    kept = replace(of.divisions[0].kept[0], backward=tuple(Line(0.0, each * draw.uniform(1, 3)) for _, each in lines))
    return Chain(of, replace(of.divisions[0], forward=lines, kept=(kept,)), 1.0)


def test_autopipe_is_near_the_best_of_all_cuts_and_never_longer_than_the_least_slowest_stage() -> None:
    worst, orders = 0.0, Orders()
    for seed in range(100):
        layers, stages = 6 + seed % 5, 3 + seed % 2
        chain = drawn_chain(seed, layers)
        every = {
            (0, *inner, layers): seconds_of(chain, (0, *inner, layers))
            for inner in combinations(range(1, layers), stages - 1)
        }
        cut, seconds = best_cut(chain, stages, orders)
        assert seconds == pytest.approx(every[cut], rel=1e-12)
        slowest = {cut: max(chain.seconds(first, end) for first, end in pairwise(cut)) for cut in every}
        least = min(slowest.values())
        assert seconds <= max(every[each] for each in every if slowest[each] <= least * (1 + 1e-12)) * (1 + 1e-12)
        worst = max(worst, seconds / min(every.values()) - 1)
    assert worst <= 0.05


def test_autopipe_halves_as_few_microbatches_as_save_most() -> None:
    for seed in range(30):
        layers, stages = 6 + seed % 5, 3 + seed % 2
        chain = replace(drawn_chain(seed, layers), samples=2.0)
        cut, count = best_cut(chain, stages, Orders())[0], 2 * stages + seed % 3
        costs = StageCosts(
            F=[chain.total("forward", first, end) for first, end in pairwise(cut)],
            B=[chain.total("backward", first, end) for first, end in pairwise(cut)],
        )
        times = []
        for first in range(stages):
            shares = halved(2 * stages, first)
            schedule = build("1f1b", ranks=stages, microbatches=len(shares), shares=shares)
            mean = 2 * stages / len(shares)
            sized = StageCosts(F=[mean * each for each in costs.F], B=[mean * each for each in costs.B])
            times.append(simulate(schedule, sized).makespan)
        first, saved = sliced(chain, cut, count, Orders())
        assert saved == pytest.approx(times[0] - min(times), abs=1e-9)
        assert saved >= 0
        assert times[first] == pytest.approx(min(times), rel=1e-8)
        assert all(each > times[first] for each in times[:first])


@pytest.mark.parametrize(("stages", "first"), [(2, 1), (4, 1), (8, 2)])
def test_halves_save_half_of_the_start_of_equal_stages(stages: int, first: int) -> None:
    chain = drawn_chain(1, stages)
    even = replace(chain.division, forward=(Line(0.0, 1.0),) * stages)
    even = replace(even, kept=(replace(even.kept[0], backward=(Line(0.0, 2.0),) * stages),))
    cut, equal = tuple(range(stages + 1)), Chain(chain.problem, even, 2.0)
    found, saved = sliced(equal, cut, 2 * stages, Orders())
    assert (found, round(saved, 9)) == (first, (stages - 1) * 2.0 / 2)
    assert sliced(replace(equal, samples=1.0), cut, 2 * stages, Orders()) == (0, 0.0)
    constant = replace(even, forward=(Line(9.0, 1.0),) * stages)  # halves would take that twice
    assert sliced(Chain(chain.problem, constant, 2.0), cut, 2 * stages, Orders())[1] == 0.0


def seconds_of(chain: Chain, cut: tuple[int, ...]) -> float:
    forward = [chain.total("forward", first, end) for first, end in pairwise(cut)]
    backward = [chain.total("backward", first, end) for first, end in pairwise(cut)]
    return played(forward, backward, 2 * len(forward))


def test_autopipes_play_is_that_of_the_order_and_its_master_is_the_slowest_stage_of_equal_ones() -> None:
    chain = drawn_chain(5, 8)
    order = Orders().of(Order("1f1b", 1), 4, 8)
    assert order is not None
    cuts = [(0, 1, 3, 6, 8), (0, 2, 4, 6, 8), (0, 4, 5, 6, 8)]
    assert length(chain, order, list(cuts)) == pytest.approx([seconds_of(chain, cut) for cut in cuts], rel=1e-12)
    even = replace(chain.division, forward=(Line(0.0, 1.0),) * 8)
    even = replace(even, kept=(replace(even.kept[0], backward=(Line(0.0, 2.0),) * 8),))
    # Of equal stages the last is never idle; if the second has most, it is the master.
    assert master_stage(Chain(chain.problem, even, 1.0), (0, 2, 4, 6, 8)) == 3
    assert master_stage(Chain(chain.problem, even, 1.0), (0, 1, 6, 7, 8)) == 1


@pytest.mark.parametrize(("depth", "count"), [(2, 2), (4, 4), (4, 8), (6, 6)])
def test_chimeras_critical_path_is_as_long_as_its_order(depth: int, count: int) -> None:
    order = Orders().of(Order("chimera", 1), depth, count)
    assert order is not None
    schedule = SPECS["chimera"].generate(ScheduleRequest(depth, count))
    for forward, backward in ((1.0, 2.0), (1.0, 1.0), (1.0, 2.7)):
        forwards, backwards = on_the_path(order, forward, backward)
        whole = simulate(schedule, Costs(forward, backward)).makespan
        if (forward, backward) != (1.0, 1.0):  # several paths are as long there
            assert forwards * forward + backwards * backward == pytest.approx(whole, rel=1e-9)
    if depth == count:  # the paper: D forwards, and 2 D - 2 backwards if a backward takes twice as long
        assert on_the_path(order, 1.0, 2.0) == (depth, 2 * depth - 2)


@pytest.mark.parametrize("seed", range(6))
def test_chimera_takes_the_fewest_microbatches_that_fit_and_the_depth_with_the_shortest_step(seed: int) -> None:
    of = problem(seed, layers=6, tight=seed % 2 == 1)
    answer, found = chimera(of), {depth: of_depth(of, depth) for depth in (2, 4)}
    known = {depth: made for depth, made in found.items() if made is not None}
    assert (answer is None) == (not known)
    if answer is not None:
        assert answer.order == Order("chimera", 1)
        least = min(known.values(), key=lambda made: made[0])
        assert answer.seconds == pytest.approx(least[0], rel=1e-9)
        assert answer.microbatches == least[1]


def of_depth(of: PlanningProblem, depth: int) -> tuple[float, int] | None:
    """The step and micro-batches of a depth, by the paper's sum; memory by what each rank holds when it is fullest."""
    width, layers = 4 // depth, len(of.layers)
    size, more = divmod(layers, depth)
    ends = [sum(size + (at < more) for at in range(stage + 1)) for stage in range(depth)]
    ranges = list(zip([0, *ends], ends, strict=False))
    for way in (0, 1):
        for count in (each for each in (1, 2, 4, 8) if each % depth == 0 and 8 % (width * each) == 0):
            samples = 8 / width / count
            rows = figures(of, samples, 1, way)
            if fullest(of, ranges, rows, samples, way, depth, count) > of.memory[4]:
                continue
            message = max(rows[end - 1][2] for _, end in ranges[:-1])
            forward = max(sum(line.of(samples) for line in of.divisions[0].forward[a:b]) for a, b in ranges) + message
            backs = of.divisions[0].kept[way].backward
            backward = max(sum(line.of(samples) for line in backs[a:b]) for a, b in ranges) + message
            schedule = SPECS["chimera"].generate(ScheduleRequest(depth, count))
            timing = simulate(schedule, Costs(forward, backward))
            late = 0.0
            for rank in range(depth):
                weights = [sum(row[1] for row in rows[slice(*ranges[at])]) for at in (rank, depth - 1 - rank)]
                sums = sum(2 * (2 * width - 1) / (2 * width) * each / 4.0 for each in weights)
                late = max(late, sums - (timing.makespan - timing.end[rank][-1]))
            return timing.makespan + late, count
    return None


def fullest(
    of: PlanningProblem,
    ranges: list[tuple[int, int]],
    rows: list[tuple[float, float, float]],
    samples: float,
    way: int,
    depth: int,
    count: int,
) -> float:
    """The most bytes of a rank: two stages, and what their micro-batches keep, with their inputs."""
    schedule, kept = SPECS["chimera"].generate(ScheduleRequest(depth, count)), of.divisions[0].kept[way]
    most = 0.0
    for rank, actions in enumerate(schedule.actions):
        live, states = dict.fromkeys(range(depth), 0), 0.0
        for stage in {rank, depth - 1 - rank}:
            states += 4 * sum(row[1] for row in rows[slice(*ranges[stage])])
        for action in actions:
            live[action.stage] += action.op.name == "F"
            held = sum(
                number * (samples * sum(line.each for line in kept.saved[a:b]) + (rows[a - 1][2] * 4.0 if a else 0.0))
                for number, (a, b) in zip(live.values(), ranges, strict=True)
            )
            most = max(most, states + held + samples * 0.1)
            live[action.stage] -= action.op.name == "B"
    return most
