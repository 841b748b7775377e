"""Planners that enumerate (2bw, megatron, varuna), against their papers' enumerations, written anew in plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_problems import figures, problem

from runner.plan.planners.published.registry import PUBLISHED
from runner.plan.planners.values import PlanningProblem
from runner.schedule import SPECS
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.simulation.clock import StageCosts, simulate

SPEED, LIMIT_RANKS = 4.0, 4
"""Bytes per second of the drawn problems' link, and the ranks of their memory."""


def drawn(seed: int) -> PlanningProblem:
    """A problem whose ranks have between a third and one and a half of what the states of all layers take."""
    of = problem(seed, layers=5)
    share = 0.3 + 1.2 * (seed % 16) / 15
    return replace(of, memory=dict.fromkeys(of.memory, int(share * states(of, 1, 0, 5))))


def even(layers: int, stages: int, *, last: bool = False) -> list[tuple[int, int]]:
    """Ranges of as many layers each, the end excluded; the first ones, or the last ones, have one more."""
    ranges, at = [], 0
    for stage in range(stages):
        extra = layers % stages
        size = layers // stages + (stage >= stages - extra if last else stage < extra)
        ranges.append((at, at + size))
        at += size
    return ranges


def states(of: PlanningProblem, tensor: int, first: int, end: int) -> float:
    """Weights, gradients and Adam's two moments of a range: the drawn problems have as many bytes of each."""
    return sum(4 * row[1] for row in figures(of, 1.0, tensor)[first:end])


def saved(of: PlanningProblem, way: int, samples: float, first: int, end: int) -> float:
    return (end - first) * samples * (0.5, 0.1)[way]


@pytest.mark.parametrize("seed", range(32))
def test_2bw_takes_the_best_of_all_depths_widths_and_powers_of_two(seed: int) -> None:
    of = drawn(seed)
    best = None
    for depth in (1, 2, 3, 4):
        for width in range(1, 4 // depth + 1):
            for samples in (1, 2, 4, 8):
                if of.batch % (width * samples):
                    continue
                count = of.batch // (width * samples)
                for way in (0, 1):
                    rows, slowest, fullest = figures(of, samples, 1, way), 0.0, 0.0
                    for first, end in even(5, depth, last=True):
                        messages = sum(2 * rows[at - 1][2] for at in (first, end) if 0 < at < 5)
                        weight = sum(row[1] for row in rows[first:end])
                        sums = 2 * (width - 1) / width * weight / SPEED / count
                        computes = sum(row[0] for row in rows[first:end])
                        slowest = max(slowest, computes + messages, sums)
                        older = weight  # the second version of the weights
                        kept = depth * saved(of, way, samples, first, end) + samples * 0.1
                        fullest = max(fullest, older + states(of, 1, first, end) + kept)
                    if fullest <= of.memory[LIMIT_RANKS] and (best is None or count * slowest < best - 1e-12):
                        best = count * slowest
    found = PUBLISHED["2bw"](of)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(32))
def test_megatron_divides_layers_first_and_takes_the_shortest_pipeline_that_fits(seed: int) -> None:
    of = drawn(seed)
    expected = None
    for tensor, depth in ((1, 1), (2, 1), (2, 2)):  # as many parts as ranks of a copy, up to the two of a node
        data = 4 // (tensor * depth)
        for way in (0, 1):
            found = []
            for count in (each for each in (1, 2, 4, 8) if 8 % (data * each) == 0):
                samples = 8 / data / count
                flight = min(depth, count)
                fullest = max(
                    states(of, tensor, a, b) + flight * saved(of, way, samples, a, b) + samples * 0.1
                    for a, b in even(5, depth)
                )
                if fullest <= of.memory[LIMIT_RANKS]:
                    whole = sum(row[0] for row in figures(of, samples, tensor, way))
                    found.append(((count + depth - 1) * whole / depth, count))
            if found and expected is None:
                expected = (tensor, depth, *min(found))
    answer = PUBLISHED["megatron"](of)
    assert (answer is None) == (expected is None)
    if answer is not None and expected is not None:
        tensor, depth, seconds, count = expected
        assert (answer.tensor, answer.pipeline, answer.microbatches) == (tensor, depth, count)
        assert answer.seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(32))
def test_varuna_takes_the_best_depth_with_the_largest_microbatch_that_fits(seed: int) -> None:
    of = drawn(seed)
    found = {}
    for depth in (1, 2, 3, 4):
        data = {1: 4, 2: 2, 3: 1, 4: 1}[depth]
        for count in (each for each in (1, 2, 4, 8) if 8 % (data * each) == 0):
            samples = 8 / data / count
            inputs = min(depth, count) * samples * max(of.divisions[0].boundary)
            if all(
                states(of, 1, a, b) + saved(of, 0, samples, a, b) + samples * 0.1 + inputs <= of.memory[LIMIT_RANKS]
                for a, b in even(5, depth)
            ):
                found[depth] = played(of, depth, count, data, samples)
                break
    answer = PUBLISHED["varuna"](of)
    assert (answer is None) == (not found)
    if answer is not None:
        assert answer.seconds == pytest.approx(min(found.values()), rel=1e-9)


def played(of: PlanningProblem, depth: int, count: int, data: int, samples: float) -> float:
    """The simulator's step of the order of so many equal micro-batches, and the longest sum that it does not hide."""
    forward, backward = of.divisions[0].forward, of.divisions[0].kept[0].backward
    ranges, rows = even(5, depth), figures(of, samples)
    costs = StageCosts(
        F=tuple(sum(line.of(samples) for line in forward[a:b]) for a, b in ranges),
        B=tuple(sum(line.of(samples) for line in backward[a:b]) for a, b in ranges),
        comm=tuple(rows[end - 1][2] for _, end in ranges[:-1]),
    )
    name = "varuna" if depth > 1 else "gpipe"
    timing = simulate(SPECS[name].generate(ScheduleRequest(depth, count)), costs)
    sums = [2 * (data - 1) / data * sum(row[1] for row in rows[a:b]) / SPEED for a, b in ranges]
    return max(timing.end[rank][-1] + each for rank, each in enumerate(sums))
