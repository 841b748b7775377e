"""Chain strategies beside references: published counts, recursions, and the same bits as without a strategy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from math import ceil, inf, log
from typing import Any

import pytest
from plan_profiles import layer, model
from programs import chains

from runner.memory.solve.build import equal_parts
from runner.memory.solve.policies import solve
from runner.memory.solve.program import forwards
from runner.memory.solve.solvers.steps import StepPlan, Variant
from runner.memory.solve.solvers.timed import TimedSplits
from runner.memory.solve.values import ChainProgram, PolicyOptions, Segment
from runner.profile import LayerProfile

AGAIN = partial(Segment, recompute=True)


def program(name: str, layers: Sequence[LayerProfile], in_flight: int = 1, **options: Any) -> ChainProgram:
    """The program of one stage with these layers."""
    chosen = PolicyOptions(name, **options)
    (made,) = chains(solve(model(layers), [(0, len(layers) - 1)], chosen, in_flight=[in_flight]))
    return made


def equal(count: int, **changes: Any) -> list[LayerProfile]:
    return [layer(**changes)] * count


def test_equal_parts_differ_by_one_layer_at_most() -> None:
    for count in range(1, 20):
        for parts in range(1, 25):
            cut = equal_parts(3, 2 + count, parts)
            sizes = [last - first + 1 for first, last in cut]
            assert (cut[0][0], cut[-1][1], len(cut)) == (3, 2 + count, min(parts, count))
            assert max(sizes) - min(sizes) <= 1


def test_chens_square_root_keeps_the_graph_of_the_last_segment_of_a_single_microbatch() -> None:
    starts = [0, 4, 8, 12]
    assert program("chen_sqrt", equal(16)) == tuple(Segment(start, start + 3, recompute=start < 12) for start in starts)
    assert program("chen_sqrt", equal(16), in_flight=2) == tuple(AGAIN(start, start + 3) for start in starts)
    assert forwards(program("chen_sqrt", equal(16), in_flight=2)) == 2 * 16


def greedy_bytes(saved: Sequence[int], bound: float, in_flight: int) -> int:
    """Memory of segments that end when they exceed the bound: the inputs of all but the first, and the largest."""
    sums, total = [0], 0
    for size in saved:
        if total and total + size > bound:
            sums.append(0)
            total = 0
        total += size
        sums[-1] += size
    return in_flight * 10 * (len(sums) - 1) + max(sums)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_chens_greedy_segments_are_nearly_the_best_of_all_bounds(in_flight: int) -> None:
    generator = random.Random(3)
    for _ in range(40):
        saved = [generator.randint(10, 90) for _ in range(generator.randint(2, 14))]
        made = program("chen_greedy", [layer(saved_bytes=size) for size in saved], in_flight)
        sums = [sum(saved[each.first : each.last + 1]) for each in made]
        bounds = {sum(saved[start:end]) for start in range(len(saved)) for end in range(start + 1, len(saved) + 1)}
        best = min(greedy_bytes(saved, bound, in_flight) for bound in bounds)
        assert best <= in_flight * 10 * (len(made) - 1) + max(sums) <= 1.05 * best


def most_inputs(made: ChainProgram) -> int:
    """Inputs, besides that of the whole, which are kept at once."""
    most = kept = len(made) - 1
    for segment in reversed(made):
        if segment.recompute and segment.inside:
            most = max(most, kept + most_inputs(segment.inside))
        kept -= 1
    return most


@pytest.mark.parametrize(("cuts", "levels"), [(1, 4), (2, 3), (3, 3)])
def test_recursive_segments_take_the_published_forwards_and_inputs(cuts: int, levels: int) -> None:
    count = (cuts + 1) ** levels
    made = program("chen_recursive", equal(count), cuts=cuts)
    assert forwards(made) == count + levels * count * cuts // (cuts + 1)
    for other in range(1, 40):
        kept = most_inputs(program("chen_recursive", equal(other), cuts=cuts))
        assert kept <= cuts * ceil(log(other, cuts + 1) - 1e-9)


def test_bisection_takes_half_a_forward_for_each_halving() -> None:
    for levels in range(7):
        count = 2**levels
        assert forwards(program("bisect", equal(count))) == count + count // 2 * levels
    assert program("bisect", equal(8), leaf=4) == (AGAIN(0, 3, inside=(Segment(0, 3),)), Segment(4, 7))


def slowest_first(seconds: tuple[float, ...], slots: int) -> float:
    """The recursion of Walther and Griewank, as it is written."""

    @cache
    def least(start: int, end: int, left: int) -> float:
        if end - start == 1:
            return 0.0
        if left == 0:
            return inf
        ways = (sum(seconds[start:k]) + least(k, end, left - 1) + least(start, k, left) for k in range(start + 1, end))
        return min(ways)

    return least(0, len(seconds), slots)


def again_seconds(made: ChainProgram, seconds: Sequence[float]) -> float:
    """Seconds of forwards without a graph, counted in a walk through the program."""
    total = 0.0
    for segment in made:
        if segment.recompute:
            inside = segment.inside or (Segment(segment.first, segment.last),)
            total += sum(seconds[segment.first : segment.last + 1]) + again_seconds(inside, seconds)
    return total


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_het_time_is_the_least_of_the_recursion(slots: int) -> None:
    generator = random.Random(slots)
    for _ in range(12):
        seconds = tuple(float(generator.randint(1, 9)) for _ in range(generator.randint(2, 9)))
        expected = slowest_first(seconds, slots)
        assert TimedSplits(seconds, slots).seconds(0, len(seconds), slots) == expected
        made = program("het_time", [layer(forward_seconds=each) for each in seconds], slots=slots)
        assert again_seconds(made, seconds) == expected


def test_het_time_with_equal_times_is_revolve() -> None:
    for count in (1, 2, 7, 19, 30):
        for slots in (1, 2, 3, 5):
            made = program("het_time", equal(count), slots=slots)
            assert forwards(made) == forwards(program("revolve", equal(count), slots=slots))


def least_steps(steps: int, memory: int, size: int, variant: str) -> float:
    """Gruslys et al. 2016, as it is written, with C(0, m) = 0 and C(1, m) = 1."""

    @cache
    def least(t: int, m: int) -> float:
        if t <= 1:
            return t
        ways = [inf]
        if variant != "ism" and m >= 1:
            ways += [y + least(t - y, m - 1) + least(y, m) for y in range(1, t)]
        if variant != "hsm" and m >= size:
            ways += [y + least(t - y, m - size) + least(y - 1, m) for y in range(1, t + 1)]
        return min(ways)

    return least(steps, memory)


@pytest.mark.parametrize("variant", ["hsm", "ism", "msm"])
def test_backpropagation_through_time_is_the_least_of_its_recursion(variant: str) -> None:
    size = 3  # layers that save 30 bytes, of which 10 are the output
    for steps in (1, 2, 5, 12):
        for memory in (3, 4, 9, 20):
            expected = least_steps(steps, memory, size, variant)
            assert StepPlan(steps, memory, size, Variant(variant)).forwards(steps, memory) == expected
            assert forwards(program("bptt", equal(steps), variant=variant, states=memory)) == expected


def test_hidden_states_alone_are_revolve() -> None:
    plan = StepPlan(40, 10, 4, Variant.HSM)
    for steps in range(1, 41):
        for memory in range(1, 11):
            assert plan.forwards(steps, memory) == forwards(program("revolve", equal(steps), slots=memory))
    assert StepPlan(30, 30, 4, Variant.HSM).forwards(30, 30) == 2 * 30 - 1


def test_a_thousand_steps_in_five_percent_of_the_memory_take_a_third_more_time() -> None:
    """Published: 95 % less memory for 1.32 times the time, if a backward takes twice as long as a forward."""
    size = 4
    memory = 1000 * size // 20
    per_step = StepPlan(1000, memory, size, Variant.MSM).forwards(1000, memory) / 1000
    assert (per_step + 2) / 3 == pytest.approx(1.317, abs=0.002)
