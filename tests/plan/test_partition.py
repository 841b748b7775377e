from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import layer, loss_layer, model

from runner.errors import RequestError
from runner.plan.cut.partition import Partition, min_max, partition, partition_problems, uniform
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.stage_limit import StageMemoryLimit
from runner.schedule.catalogue import registry


def every_partition(num_layers: int, stages: int) -> list[Partition]:
    cuts = itertools.combinations(range(1, num_layers), stages - 1)
    return [tuple((i, j - 1) for i, j in itertools.pairwise((0, *cut, num_layers))) for cut in cuts]


def stage_costs(costs: Sequence[float], layers: Partition) -> list[float]:
    return [sum(costs[first : last + 1]) for first, last in layers]


@dataclass(frozen=True)
class Capacity:
    """Stage s holds at most ``capacity[s]`` of the layers' weights."""

    weights: Sequence[int]
    capacity: Sequence[int]

    def fits(self, first: int, last: int, stage: int) -> bool:
        return sum(self.weights[first : last + 1]) <= self.capacity[stage]

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        return not self.fits(first, last, stage)

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        return sum(self.weights[first : last + 1])

    def floor_bytes(self, first: int, last: int, stage: int) -> int:
        return self.peak_bytes(first, last, stage)


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(0, 9), min_size=4, max_size=10),
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_stages_with_replicas_equal_brute_force(costs: list[int], replicas: list[int]) -> None:
    """Seconds of a stage are divided by the ranks that take turns; multiples of twelve have no rounding."""
    found = min_max([12.0 * cost for cost in costs], len(replicas), replicas=replicas)
    assert found is not None

    def worst(way: Partition) -> tuple[float, float]:
        own = [12 * cost / each for cost, each in zip(stage_costs(costs, way), replicas, strict=True)]
        return max(own), sum(cost**2 for cost in own)

    assert worst(found) == min(worst(way) for way in every_partition(len(costs), len(replicas)))


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=12), stages=st.integers(1, 5))
def test_min_max_equals_brute_force(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        return
    found = min_max([float(cost) for cost in costs], stages)
    assert found is not None
    ways = [stage_costs(costs, way) for way in every_partition(len(costs), stages)]
    expected = min((max(way), sum(cost**2 for cost in way)) for way in ways)
    own = stage_costs(costs, found)
    assert (max(own), sum(cost**2 for cost in own)) == expected


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=11),
    capacity=st.lists(st.integers(1, 16), min_size=1, max_size=5),
)
def test_min_max_under_a_limit_of_each_stage_equals_brute_force(
    rows: list[tuple[int, int]], capacity: list[int]
) -> None:
    if len(capacity) > len(rows):
        return
    costs, weights = [cost for cost, _ in rows], [weight for _, weight in rows]
    limit = Capacity(weights, capacity)
    found = min_max([float(cost) for cost in costs], len(capacity), limit=limit)
    ways = [
        stage_costs(costs, way)
        for way in every_partition(len(costs), len(capacity))
        if all(limit.fits(first, last, stage) for stage, (first, last) in enumerate(way))
    ]
    if not ways:
        assert found is None
        return
    assert found is not None
    assert all(limit.fits(first, last, stage) for stage, (first, last) in enumerate(found))
    own = stage_costs(costs, found)
    expected = min((max(way), sum(cost**2 for cost in way)) for way in ways)
    assert (max(own), sum(cost**2 for cost in own)) == expected


@given(num_layers=st.integers(1, 40), stages=st.integers(1, 10))
def test_uniform_gives_the_extra_layers_to_the_first_stages(num_layers: int, stages: int) -> None:
    if stages > num_layers:
        return
    sizes = [last - first + 1 for first, last in uniform(num_layers, stages)]
    assert sum(sizes) == num_layers
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_policies_weigh_what_they_say() -> None:
    profile = model(
        [layer(num_parameters=60, forward_seconds=0.1, backward_seconds=0.1)]
        + [layer(num_parameters=10, forward_seconds=1, backward_seconds=2)] * 5,
        loss=loss_layer(forward_seconds=4, backward_seconds=3),  # with either alone the last two layers are a stage
    )
    assert partition("uniform", profile, 2) == ((0, 2), (3, 5))
    assert partition("parameters", profile, 2) == ((0, 0), (1, 5))
    assert partition("profile", profile, 2) == ((0, 4), (5, 5))
    assert partition("manual", profile, 3, boundaries=[1, 5]) == ((0, 0), (1, 4), (5, 5))


@pytest.mark.parametrize(
    ("boundaries", "rule"),
    [
        ([3], "3 stages need 2 boundaries"),
        (None, "3 stages need 2 boundaries"),
        ([0, 3], "must lie in 1 .. 5"),
        ([2, 6], "must lie in 1 .. 5"),
        ([4, 2], "boundaries must rise"),
        ([2, 2], "boundaries must rise"),
    ],
)
def test_wrong_boundaries_are_named(boundaries: list[int] | None, rule: str) -> None:
    lines = [problem.line() for problem in partition_problems("manual", boundaries, 3, 6)]
    assert any(rule in line for line in lines)
    assert all(line.startswith("partition.boundaries = [") for line in lines)
    assert all(line.endswith("Try partition.boundaries=[2,4].") for line in lines)


def test_more_stages_than_layers_is_refused_with_the_way_out() -> None:
    with pytest.raises(RequestError, match=r"parallelism.pipeline = 3: .* Try parallelism.pipeline=2"):
        partition("uniform", model([layer()] * 2), 3)


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(RequestError, match="must be one of auto, uniform, parameters, profile, memory, manual"):
        partition("even", model([layer()] * 2), 2)


def test_no_partition_under_the_limit_is_said() -> None:
    limit = Capacity([1] * 4, [1, 1])
    with pytest.raises(RequestError, match="keeps every rank under the memory limit"):
        partition("profile", model([layer()] * 4), 2, limit=limit)


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)], ids=["v2", "looping2", "v3"])
@given(seconds=st.lists(st.integers(1, 9), min_size=6, max_size=9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ranks_that_share_stages_are_balanced(placement: tuple[int, ...], seconds: list[int]) -> None:
    """Never worse than the stages alone, and mostly the best there is."""
    profile = model([layer(forward_seconds=float(each), backward_seconds=0.0) for each in seconds])
    busiest = [max(rank_sums(seconds, cut, placement)) for cut in every_partition(len(seconds), len(placement))]
    alone = partition("profile", profile, len(placement))
    together = partition("profile", profile, len(placement), placement=placement)
    found = max(rank_sums(seconds, together, placement))
    assert min(busiest) <= found <= max(rank_sums(seconds, alone, placement))
    assert found <= 1.34 * min(busiest)


def test_a_v_of_equal_stages_would_be_uneven() -> None:
    seconds = [4, 3, 7, 4, 4, 4]
    profile = model([layer(forward_seconds=float(each), backward_seconds=0.0) for each in seconds])
    assert partition("profile", profile, 4) == ((0, 1), (2, 2), (3, 4), (5, 5))  # 11 and 15
    together = partition("profile", profile, 4, placement=(0, 1, 1, 0))
    assert sorted(rank_sums(seconds, together, (0, 1, 1, 0))) == [12, 14]


def rank_sums(seconds: list[int], layers: tuple[tuple[int, int], ...], placement: tuple[int, ...]) -> list[float]:
    sums = [0.0] * (max(placement) + 1)
    for rank, cost in zip(placement, stage_costs(seconds, layers), strict=True):
        sums[rank] += cost
    return sums


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(12))
def test_memory_equals_brute_force_over_peaks_and_then_over_time(seed: int, schedule: str) -> None:
    draw = random.Random(seed)
    rows = [
        layer(
            weight_bytes=draw.randint(0, 90), gradient_bytes=draw.randint(0, 90), saved_bytes=draw.randint(20, 90),
            output_bytes=draw.choice([5, 10, 20]), forward_seconds=float(draw.randint(1, 4)),
        )
        for _ in range(7)
    ]  # fmt: skip
    order = registry.build(schedule, ranks=3, microbatches=4)
    peaks = StageMemoryLimit.of(model(rows), order, [10**9] * order.ranks, MemoryNeeds(4, temporaries=2))

    def cost(layers: Partition) -> tuple[int, float]:
        peak = max(peaks.peak_bytes(first, last, stage) for stage, (first, last) in enumerate(layers))
        return peak, max(stage_costs([row.forward_seconds + row.backward_seconds for row in rows], layers))

    found = partition("memory", model(rows), 3, limit=peaks)
    assert cost(found) == min(map(cost, every_partition(7, 3)))


def test_memory_gives_fewer_layers_to_the_stages_that_hold_more_in_flight() -> None:
    order = registry.build("1f1b", ranks=4, microbatches=8)
    profile = model([layer(weight_bytes=1, gradient_bytes=1)] * 16)
    peaks = StageMemoryLimit.of(profile, order, [10**9] * order.ranks, MemoryNeeds(8, temporaries=2))
    sizes = [last - first + 1 for first, last in partition("memory", profile, 4, limit=peaks)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
