"""The schedule that chooses itself, on layers of random durations."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import pytest

from runner.schedule import build
from runner.schedule.catalogue.registry import SEARCHED
from runner.schedule.checking.schedule import check
from runner.schedule.generators.list_orders import list_orders, shortest_order
from runner.schedule.generators.search import Choice, search
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.simulation.bounds import lower_bound
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Op, Schedule

CASES = 200
SAMPLE = 8


@dataclass(frozen=True)
class Case:
    """Layers with their seconds of F, I and W, and what is asked of them."""

    layers: tuple[tuple[float, float, float], ...]
    ranks: int
    microbatches: int
    limit: int
    message: float

    @property
    def request(self) -> ScheduleRequest:
        return ScheduleRequest(self.ranks, self.microbatches, options={"memory_limit": self.limit})

    def costs_of(self, placement: Sequence[int]) -> StageCosts:
        """Stages of about equal work, cut where the sum of the layers passes each share."""
        total, stages = sum(map(sum, self.layers)), len(placement)
        cuts = [0]
        for stage in range(1, stages):
            passed = itertools.accumulate(map(sum, self.layers))
            first = next(i for i, reached in enumerate(passed, 1) if reached >= total * stage / stages)
            cuts.append(min(max(first, cuts[-1] + 1), len(self.layers) - stages + stage))
        parts = [self.layers[a:b] for a, b in itertools.pairwise([*cuts, len(self.layers)])]
        f, i, w = (tuple(sum(layer[op] for layer in part) for part in parts) for op in range(3))
        whole = tuple(a + b for a, b in zip(i, w, strict=True))
        return StageCosts(f, whole, i, w, (self.message,) * (stages - 1))

    def rate(self, schedule: Schedule) -> tuple[float, bool]:
        played = simulate(schedule, self.costs_of(schedule.placement[0]))
        return played.makespan, max(played.peak_activations) <= self.limit


def case(seed: int) -> Case:
    """Unequal layers, 2 to 6 ranks; the three limits are those of 1F1B, one and a half of it, and twice."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 3, 4, 6))
    limit = (ranks, 3 * ranks // 2, 2 * ranks)[seed % 3]
    forwards = [1 + rng.choice((0.0, 0.5, 1.0)) * rng.random() for _ in range(4 * ranks)]
    layers = tuple((f, f * rng.uniform(0.8, 1.4), f * rng.uniform(0.6, 1.2)) for f in forwards)
    return Case(layers, ranks, rng.randint(ranks, 3 * ranks), limit, rng.choice((0.0, 0.1)))


def best_published(given: Case) -> float:
    """The shortest of the published schedules that fits, found without the search."""
    rated = [
        given.rate(spec.generate(asked)) for spec in SEARCHED for asked in requests_of(given) if spec.accepts(asked)
    ]
    return min(seconds for seconds, fits in rated if fits)


def requests_of(given: Case) -> list[ScheduleRequest]:
    """With all numbers of chunks; chimera's others, which keep the micro-batches' size, besides."""
    asked = ScheduleRequest(given.ranks, given.microbatches)
    chimeras = itertools.product(({}, {"variant": "doubling"}), (2, 4, 6))
    return [
        *(replace(asked, chunks=chunks) for chunks in (1, 2, 3, 4)),
        *(replace(asked, chunks=1, options={**form, "pipes": pipes}) for form, pipes in chimeras),
    ]


def searched(given: Case) -> Choice:
    choice = search(given.request, SEARCHED, given.costs_of, given.rate)
    assert not check(choice.best.schedule)
    assert choice.best.fits
    assert choice.best.seconds == given.rate(choice.best.schedule)[0] <= best_published(given)
    assert choice.over_bound > 1 - 1e-9
    return choice


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(SAMPLE), id="sample"), pytest.param(range(CASES), id="all", marks=pytest.mark.full)]
)
def test_it_is_no_worse_than_the_best_published_and_near_the_bound(seeds: range) -> None:
    """And an order that is found beats all published ones in some cases, whose stages differ."""
    found = [searched(case(seed)) for seed in seeds]
    assert median(choice.over_bound for choice in found) <= 1.02
    assert any(choice.best.schedule.name == "auto" for choice in found)
    assert any(choice.beaten and choice.best.seconds < 0.99 * choice.beaten.seconds for choice in found)


@pytest.mark.parametrize("seed", range(4))
def test_no_published_order_ends_before_the_bound(seed: int) -> None:
    given = case(seed)
    for spec, chunks in itertools.product(SEARCHED, (1, 2, 3, 4)):
        asked = ScheduleRequest(given.ranks, given.microbatches, chunks=chunks)
        if not spec.accepts(asked):
            continue
        schedule = spec.generate(asked)
        costs = given.costs_of(schedule.placement[0])
        played = simulate(schedule, costs)
        recompute = any(action.op is Op.R for row in schedule.actions for action in row)
        kept = max(played.peak_activations)
        bound = lower_bound(schedule, costs, kept, recompute=recompute)
        assert bound <= played.makespan * (1 + 1e-9)


def test_doubled_forwards_and_more_pipelines_are_tried() -> None:
    specs = [spec for spec in SEARCHED if spec.name == "chimera"]
    given = Case(((1.0, 1.0, 1.0),) * 16, ranks=4, microbatches=16, limit=16, message=0.0)
    choice = search(given.request, specs, given.costs_of, given.rate)
    tried = {(len(each.schedule.placement), each.schedule.joined) for each in choice.named}
    assert tried == {(2, 1), (2, 2), (4, 1), (4, 2)}
    assert len(choice.named[0].schedule.placement) == 4


def test_the_bound_is_met_where_it_can_be() -> None:
    """ZB-H2 of equal stages begins when the first micro-batch comes and then never waits."""
    costs = StageCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    schedule = build("zb_h2", ranks=4, microbatches=12)
    assert simulate(schedule, costs).makespan == lower_bound(schedule, costs) == 39


def test_a_limit_alone_can_be_what_bounds() -> None:
    """One micro-batch at a time: each goes there and back before the next begins."""
    costs = StageCosts((1.0,) * 3, (2.0,) * 3, (1.0,) * 3, (1.0,) * 3, (0.5,) * 2)
    naive = build("naive", ranks=3, microbatches=5)
    bound = lower_bound(naive, costs, limit=1)
    assert bound == 5 * (3 + 3 + 1 + 4 * 0.5)
    assert bound < simulate(naive, costs).makespan


def test_orders_with_a_split_backward_are_left_out_where_they_cannot_run() -> None:
    given = case(3)

    def rate(schedule: Schedule) -> tuple[float, bool] | None:
        return None if any(action.op is Op.W for row in schedule.actions for action in row) else given.rate(schedule)

    choice = search(given.request, SEARCHED, given.costs_of, rate)
    for rated in (choice.best, *choice.named):
        assert not any(action.op is Op.W for row in rated.schedule.actions for action in row)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "chimera"])
def test_the_shortest_order_is_that_of_all_rules(seed: int, name: str) -> None:
    """It gives up orders on the way; none of them is shorter than the one that it finds."""
    given = case(seed)
    placed = build(name, ranks=2 * (given.ranks // 2), microbatches=2 * given.ranks)
    costs, split = given.costs_of(placed.placement[0]), seed % 3 > 0
    orders = list(list_orders("auto", placed, costs, given.limit, split=split))
    spans = [simulate(order, costs).makespan for order in orders]
    least = min(spans)
    assert shortest_order("auto", placed, costs, given.limit, math.inf, split=split) == (
        least,
        orders[spans.index(least)],
    )
    assert shortest_order("auto", placed, costs, given.limit, least, split=split) == (least, None)
    assert not any(check(order) for order in orders)


def test_what_would_be_shorter_and_does_not_fit_is_told() -> None:
    given = Case(((1.0, 1.0, 1.0),) * 16, ranks=4, microbatches=12, limit=2, message=0.0)
    choice = search(given.request, SEARCHED, given.costs_of, given.rate)
    assert choice.too_large is not None
    assert choice.too_large.seconds < choice.best.seconds
    assert not choice.too_large.fits


def test_by_name() -> None:
    """Equal stages: at least as good as a V without idle time; a limit below what that keeps gives another order."""
    wide, v = build("auto", ranks=4, microbatches=8), build("zb_v", ranks=4, microbatches=8)
    assert simulate(wide, Costs()).makespan <= simulate(v, Costs()).makespan
    narrow = build("auto", ranks=4, microbatches=16, memory_limit=2)
    assert max(simulate(narrow, Costs()).peak_activations) <= 2
    assert build("auto", ranks=1, microbatches=4).ranks == 1
