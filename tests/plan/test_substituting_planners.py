"""vPipe's choices and cuts, and Unity's graphs, against every choice, every cut and every graph."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from planning_problems import cuts, problem

from runner.errors import Problem, RequestError
from runner.launch.run.find_layout import _with_substitutions
from runner.plan.planners.choose import Choice
from runner.plan.planners.published.chain import Chain
from runner.plan.planners.published.unity import Costs, Graph, best_graph, best_substitutions
from runner.plan.planners.published.unity import plan as unity
from runner.plan.planners.published.vpipe import Row, cut_and_ways, in_stage
from runner.plan.planners.published.vpipe import plan as vpipe
from runner.plan.planners.values import Line, PlanningProblem
from runner.plan.values import Link


def least_added(rows: list[Row], room: float, hidden: float) -> float | None:
    """The least added seconds of all 3 to the power of layers choices."""
    found = []
    for ways in product("kam", repeat=len(rows)):
        size = sum({"k": row.kept, "a": row.again, "m": 0.0}[way] for row, way in zip(rows, ways, strict=True))
        if size <= room:
            extra = sum(row.extra for row, way in zip(rows, ways, strict=True) if way == "a")
            copies = sum(row.copy for row, way in zip(rows, ways, strict=True) if way == "m")
            found.append(extra + max(0.0, copies - hidden - extra))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_vpipe_chooses_for_each_layer_as_all_choices_do(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [
        Row(draw.uniform(1, 4), draw.uniform(0, 0.5), draw.uniform(0.5, 2), draw.uniform(0.5, 4)) for _ in range(3)
    ]
    rows = [draw.choice(kinds) for _ in range(7)]
    for part in (0.0, 0.1, 0.4, 0.8, 1.0):
        room, hidden = part * sum(row.kept for row in rows), draw.uniform(0, 6)
        found, least = in_stage(rows, room, hidden), least_added(rows, room, hidden)
        assert (found is None) == (least is None)
        if found is not None:
            assert found.added == pytest.approx(least, rel=1e-12, abs=1e-12)
            apart = set(found.again), set(found.moved)
            assert not apart[0] & apart[1]
            kept = sum(row.kept for at, row in enumerate(rows) if at not in apart[0] | apart[1])
            assert kept + sum(rows[at].again for at in apart[0]) <= room * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_host", [False, True])
def test_vpipes_cut_fits_and_is_near_the_best_of_all(seed: int, with_host: bool) -> None:
    of = memory_bound(seed, with_host=with_host)
    keep, less = (Chain(of, of.divisions[0], 1.0, way) for way in (0, 1))
    found = cut_and_ways(keep, less, 3, 8)
    every = [slowest_of(of, ranges) for ranges in cuts(7) if len(ranges) == 3]
    known = [each for each in every if each is not None]
    if found is None:
        assert len(known) < len(every), "moves do not look at every cut, but where all fit, so does the even one"
        return
    seconds, cut, _ = found
    own = slowest_of(of, list(zip(cut, cut[1:], strict=False)))
    assert own is not None
    assert seconds == pytest.approx(own, rel=1e-9)
    assert min(known) * (1 - 1e-9) <= seconds <= min(known) * 1.2
    even = slowest_of(of, [(0, 3), (3, 5), (5, 7)])
    assert even is None or seconds <= even * (1 + 1e-12)


def memory_bound(seed: int, *, with_host: bool) -> PlanningProblem:
    """A problem whose first stages do not fit if everything is kept."""
    of = problem(seed, layers=7)
    division = of.divisions[0]
    draw = random.Random(seed)
    saved = tuple(draw.uniform(1, 4) for _ in range(7))
    whole, rerun = division.kept
    kept = tuple(
        replace(way, saved=tuple(Line(0.0, part * one) for one in saved)) for way, part in ((whole, 1.0), (rerun, 0.2))
    )
    limit = int(2 * sum(division.weight) + sum(saved))
    host = Link(0.0, 3.0) if with_host else None
    return replace(of, divisions=(replace(division, kept=kept),), memory={4: limit}, host=host)


def slowest_of(of: PlanningProblem, ranges: list[tuple[int, int]]) -> float | None:
    """Seconds of the slowest of three stages, each with the best of all its choices."""
    division, found = of.divisions[0], []
    for stage, (first, end) in enumerate(ranges):
        layers, flight = range(first, end), 3 - stage
        seconds = sum(division.forward[at].of(1.0) + division.kept[0].backward[at].of(1.0) for at in layers)
        rows = [
            Row(
                flight * division.kept[0].saved[at].each,
                flight * division.kept[1].saved[at].each,
                division.kept[1].backward[at].of(1.0) - division.kept[0].backward[at].of(1.0),
                division.kept[0].saved[at].each / 3.0 if of.host is not None else 1e9,
            )
            for at in layers
        ]
        room = of.memory[4] - 4 * sum(division.weight[at] for at in layers) - 0.1
        plain = sum(row.kept for row in rows)
        best = 0.0 if plain <= room else None
        if best is None:
            # Nothing moves, or there is room for one layer that leaves and one that comes back.
            passing = 2 * max(division.kept[0].saved[at].each for at in layers)
            still = [row._replace(copy=1e9) for row in rows]
            free, tight = least_added(rows, room, seconds), least_added(rows, room - passing, seconds)
            alone = least_added(still, room, seconds)
            best = alone if alone is not None and free is not None and alone <= free * (1 + 1e-12) else tight
        if best is None or best > 1e6:
            return None
        found.append(seconds + best)
    return max(found)


def test_vpipe_asks_for_moves_only_where_there_is_a_host_of_its_own() -> None:
    moved = 0
    for seed in range(8):
        here, there = (vpipe(memory_bound(seed, with_host=host)) for host in (False, True))
        assert here is None or here.offload is None
        if there is not None and there.offload is not None:
            moved += 1
            assert there.overrides({})["offload"] == "activations_vpipe"
    assert moved


@pytest.mark.parametrize("seed", range(6))
def test_unity_finds_the_best_of_all_graphs_if_nothing_is_skipped(seed: int) -> None:
    of = problem(seed, layers=5)
    costs = Costs(of, 8)
    every = list(product(costs.places, repeat=5))
    assert len(every) == 2**5
    best = min(every, key=costs.seconds)
    assert best_graph(costs, 0.0, alpha=float("inf"), budget=10**6) == best
    assert costs.seconds(best_graph(costs, 0.0)) <= costs.seconds((0,) * 5)
    for graph in every:
        assert costs.seconds(graph) == pytest.approx(step_of(of, graph), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_unity_adds_substitutions_while_a_step_gets_shorter(seed: int) -> None:
    draw = random.Random(seed)
    gains, pair = {name: draw.uniform(-2, 2) for name in "abcd"}, draw.uniform(-3, 3)
    asked: list[tuple[str, ...]] = []

    def seconds(names: tuple[str, ...]) -> float:
        asked.append(names)
        if names == ("d",):  # which is refused alone
            return math.inf
        return 20 - sum(gains[name] for name in names) - pair * ({"a", "d"} <= {*names})

    every = [chosen for count in range(5) for chosen in combinations("abcd", count)]
    best = min(every, key=seconds)
    asked.clear()
    assert best_substitutions("dcba", seconds, alpha=math.inf, budget=100) == best
    assert len(asked) == len(set(asked)) == 2**4
    asked.clear()
    found = best_substitutions("dcba", seconds)
    assert seconds(found) <= seconds(())
    assert len(asked) <= 1 + 4 + 3 + 2 + 2
    assert all(gains[name] < 0 for name in "abc" if name not in found) or pair < 0 or "d" in found


class _Judge:
    """Plans requests by given seconds."""

    def __init__(self, seconds: dict[tuple[str, ...], float], *, spread: float = 0.0) -> None:
        self._seconds, self._spread = seconds, spread

    def typed(self, keys: dict[str, Any]) -> Any:
        made = tuple(keys.get("kernels.substitutions", "ab" if "kernels" in keys else ""))
        if made not in self._seconds:
            raise RequestError([Problem("kernels.substitutions", made, "must find something to replace")])
        profile = SimpleNamespace(spread=self._spread, substituted=tuple(f"{name} at 1 place" for name in made))
        time = SimpleNamespace(step_seconds=self._seconds[made])
        return SimpleNamespace(profile=profile, time=time, fits=True)


@pytest.mark.parametrize(
    ("seconds", "spread", "best", "plans"),
    [
        ({(): 1.0, ("a",): 0.9, ("a", "b"): 0.8}, 0.0, ["a", "b"], 4),
        ({(): 1.0, ("a",): 0.9, ("b",): 1.1, ("a", "b"): 0.95}, 0.0, ["a"], 5),
        ({(): 1.0, ("a",): 0.9, ("a", "b"): 0.8}, 0.3, None, 4),
        ({(): 1.0, ("a",): 1.2, ("b",): 0.99, ("a", "b"): 1.3}, 0.0, None, 5),
        ({(): 1.0}, 0.0, None, 1),
    ],
)
def test_a_layout_gets_the_substitutions_that_are_known_to_be_faster(
    seconds: dict[tuple[str, ...], float], spread: float, best: list[str] | None, plans: int
) -> None:
    judge: Any = _Judge(seconds, spread=spread)
    answer: Any = None
    plain = Choice(answer, {"parallelism.data": 2}, judge.typed({}))
    found, made = _with_substitutions(plain, judge)
    assert found.keys.get("kernels.substitutions") == best
    assert found.keys["parallelism.data"] == 2
    assert found.seconds <= plain.seconds
    assert made == plans


def step_of(of: PlanningProblem, graph: Graph) -> float:
    """Seconds of a step of 8 micro-batches of one sample on 4 devices, by the planner's sum."""
    whole = 0.0
    for at, place in enumerate(graph):
        division = of.divisions[place]
        data = 4 // division.tensor
        compute = division.forward[at].of(1.0) + division.kept[0].backward[at].of(1.0)
        whole += 8 / data * compute + 2 * (data - 1) / data * division.gradient[at] / 4.0
        if at < 4 and graph[at + 1] != place:
            whole += 2 * 8 / 4 * of.divisions[0].boundary[at] / 4.0
    return whole


def test_unity_weighs_bytes_where_the_fastest_graph_does_not_fit() -> None:
    of = problem(2, layers=5)
    costs = Costs(of, 8)
    sizes = sorted(costs.size(graph) for graph in product(costs.places, repeat=5))
    fastest = best_graph(costs, 0.0)
    tight = replace(of, memory=dict.fromkeys((1, 2, 4), int(costs.size(fastest)) - 1))
    answer = unity(tight)
    assert (answer is None) == (sizes[0] > tight.memory[4])
    if answer is not None:
        assert answer.peak_bytes is not None
        assert answer.peak_bytes <= tight.memory[4]
        assert answer.seconds >= costs.seconds(fastest)
    assert unity(replace(of, memory=dict.fromkeys((1, 2, 4), int(sizes[0]) - 1))) is None
