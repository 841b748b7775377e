"""Published planners on drawn problems, each against an enumeration with its own cost model, written anew here."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from planning_problems import cuts, figures, problem, shares

from runner.config.schema import PlannerConfig
from runner.errors import RequestError
from runner.plan.planners.kinds import PlannerKind
from runner.plan.planners.published.alpa import pipelined
from runner.plan.planners.published.alpa import plan as plan_by_alpa
from runner.plan.planners.published.alpa_inside import least
from runner.plan.planners.published.chain import Chain, given_microbatches
from runner.plan.planners.published.dapple import Placed, length, placed_blocks
from runner.plan.planners.published.pipedream import slowest, slowest_by_levels
from runner.plan.planners.published.placing import Place, nodes_of
from runner.plan.planners.published.registry import PUBLISHED, answer_of, form_that_runs, planner_of
from runner.plan.planners.values import Line, PlanningAnswer, PlanningProblem
from runner.plan.time.network import LinkClass, Network
from runner.plan.values import Link
from runner.schedule.catalogue.registry import build
from runner.schedule.simulation.clock import StageCosts, simulate

FOR_EACH = (
    "pipedream",
    "pipe_torch",
    "piper",
    "efftra",
)  # of stages whose numbers of replicas need not divide the micro-batches


def least_of_level(rows: list[tuple[float, float, float]], machines: list[int], speeds: list[float]) -> float:
    """The slowest stage by PipeDream's repository, by all cuts and shares of each level, the innermost first."""
    *inner, most = machines

    @cache
    def together(first: int, end: int) -> float:
        own = rows[first:end]
        return least_of_level(own, inner, speeds[:-1]) if inner else sum(row[0] for row in own)

    best = math.inf
    for ranges in cuts(len(rows)):
        for own in shares(len(ranges), most) if len(ranges) <= most else ():
            pairs = list(zip(own, ranges, strict=True))
            sums = [4 * (m - 1) * sum(row[1] for row in rows[a:b]) / m for m, (a, b) in pairs]
            times = [
                together(a, b) + each / speeds[-1] / math.prod(inner) for each, (a, b) in zip(sums, ranges, strict=True)
            ]
            best = min(best, max(each / m for each, m in zip(times, own, strict=True)))
    return best


@pytest.mark.parametrize(("layers", "devices"), [(4, 2), (7, 3), (9, 4), (12, 5), (12, 4)])
def test_pipedreams_two_forms_are_the_least_of_all_cuts_and_shares(layers: int, devices: int) -> None:
    for seed in range(3):
        of = problem(100 * layers + seed, layers=layers, ranks=devices)
        rows = figures(of, 2.0)
        chain = Chain(of, of.divisions[0], 2.0)
        found, stages, own = slowest_by_levels(chain, of.links.levels(devices))
        assert found == pytest.approx(least_of_level(rows, [devices], [4.0]), rel=1e-12)
        assert sum(own) == devices
        least = math.inf
        for ranges in cuts(layers):
            for replicas in shares(len(ranges), devices) if len(ranges) <= devices else ():
                pairs = [(m, rows[a:b]) for m, (a, b) in zip(replicas, ranges, strict=True)]
                each = [max(sum(r[0] for r in s), 2 * (m - 1) * sum(r[1] for r in s) / 4.0) / m for m, s in pairs]
                least = min(least, max([*each, *(2 * rows[end - 1][2] for _, end in ranges[:-1])]))
        assert slowest(chain, devices)[0] == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(("seed", "node", "nodes"), [(0, 2, 2), (1, 2, 2), (2, 3, 2), (3, 2, 3), (4, 4, 2)])
def test_pipedreams_levels_are_the_classes_of_links(seed: int, node: int, nodes: int) -> None:
    """A node's devices are one machine of the level above; the network is that of a whole node, and shared."""
    of = problem(seed, layers=6, ranks=node * nodes)
    inner, outer = Link(0.0, 4.0), Link(0.0, 1.5)
    network = Network((LinkClass(inner, node), LinkClass(outer, None, shared=True)))
    of = replace(of, links=network)
    levels = network.levels(of.ranks)
    assert levels == [(node, inner), (node * nodes, Link(0.0, 1.5 / node))]
    assert network.levels(node) == [(node, inner)]
    assert network.levels(node + 1)[0][0] == node + 1, "nodes that are not whole are no level"
    chain = Chain(of, of.divisions[0], 2.0)
    found, stages, own = slowest_by_levels(chain, levels)
    assert found == pytest.approx(least_of_level(figures(of, 2.0), [node, nodes], [4.0, 1.5 / node]), rel=1e-12)
    assert sum(own) == of.ranks
    assert [layer for a, b in stages for layer in range(a, b + 1)] == list(range(6))
    asked = planner_of(PlannerConfig("pipedream", form="repository"))(of)
    assert asked is not None
    samples = of.batch / given_microbatches(of)
    assert asked.seconds == pytest.approx(
        given_microbatches(of) * slowest_by_levels(Chain(of, of.divisions[0], samples), levels)[0]
    )


def on_nodes(seed: int, node: int, nodes: int, speed: float, layers: int) -> PlanningProblem:
    """A problem whose nodes have a link of their own to the others, which their devices share."""
    of = problem(seed, layers=layers, ranks=node * nodes)
    return replace(of, links=Network((LinkClass(Link(0.0, 4.0), node), LinkClass(Link(0.0, speed), None, shared=True))))


@dataclass(frozen=True)
class OnDevices:
    """DAPPLE's figures of stages whose devices are named one by one, written anew.

    Args:
        rows: seconds, weight and seconds of a message within a node of each layer.
        node: devices of a node.
        slower: how many times longer a message between nodes takes.
        aside: pipelines side by side.
    """

    rows: list[tuple[float, float, float]]
    node: int
    slower: float
    aside: int

    def messages(self, ranges: list[tuple[int, int]], devices: tuple[tuple[int, ...], ...]) -> list[float]:
        found = []
        for (_, end), sender, receiver in zip(ranges, devices, devices[1:], strict=False):
            there = {each // self.node for each in receiver}
            away = [each for each in sender if len(there) > 1 or each // self.node not in there]
            part = 1.0 if len(there) > 1 else len(away) / len(sender)
            found.append(2 * self.rows[end - 1][2] * (part * self.aside * self.slower if part else 1.0))
        return found

    def times(self, ranges: list[tuple[int, int]], devices: tuple[tuple[int, ...], ...]) -> list[float]:
        pairs = zip(ranges, devices, strict=True)
        return [sum(row[0] for row in self.rows[a:b]) * self.aside / len(own) for (a, b), own in pairs]

    def note(self, into: dict[int, float], ranges: list[tuple[int, int]], devices: tuple[tuple[int, ...], ...]) -> None:
        """Note the slowest stage or message, if it is the least of so many stages."""
        block = max([*self.times(ranges, devices), *self.messages(ranges, devices)])
        into[len(ranges)] = min(block, into.get(len(ranges), math.inf))

    def length(self, ranges: list[tuple[int, int]], devices: tuple[tuple[int, ...], ...], count: int) -> float:
        times, messages = self.times(ranges, devices), self.messages(ranges, devices)
        block, late = max([*times, *messages]), 0.0
        for number, ((a, b), own) in enumerate(zip(ranges, devices, strict=True)):
            slower = self.slower if len({each // self.node for each in own}) > 1 else 1.0
            weights = sum(row[1] for row in self.rows[a:b])
            late = max(late, 2 * (len(own) - 1) * weights / len(own) / 4.0 * slower - number * block)
        return block * (count - 1) + sum(times) + sum(messages) + late


def every_device(sizes: tuple[int, ...], free: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give stages of these sizes devices of their own."""
    if not sizes:
        yield ()
        return
    for own in combinations(free, sizes[0]):
        left = tuple(each for each in free if each not in own)
        yield from ((own, *rest) for rest in every_device(sizes[1:], left))


def devices_of(places: tuple[Place, ...], node: int) -> tuple[tuple[int, ...], ...]:
    """Devices of these places, the lowest free numbers of each node."""
    taken = [0] * len(places[0])
    found = []
    for place in places:
        own = list[int]()
        for at, more in enumerate(place):
            own += [at * node + taken[at] + each for each in range(more)]
            taken[at] += more
        found.append(tuple(own))
    return tuple(found)


@pytest.mark.parametrize(
    ("node", "nodes", "layers", "speed", "aside"),
    [
        (4, 1, 6, 4.0, 1),
        (2, 2, 4, 0.3, 1),
        (2, 2, 6, 0.3, 1),
        (2, 2, 8, 0.7, 1),
        (2, 2, 6, 0.3, 2),
        (3, 2, 4, 0.2, 1),
        (2, 3, 4, 0.2, 1),
    ],
)
def test_dapple_finds_the_least_slowest_stage_of_all_cuts_replicas_and_places(
    node: int, nodes: int, layers: int, speed: float, aside: int
) -> None:
    """Its three ways to place replicas are enough for the least of all places, by the number of stages."""
    better = 0
    for seed in range(8):
        of = on_nodes(seed, node, nodes, speed, layers)
        own, each = nodes_of(of.links, of.ranks), of.ranks // aside
        figured = OnDevices(figures(of, 2.0), node, 4.0 / speed, aside)
        least, in_order, found = dict[int, float](), dict[int, float](), dict[int, float]()

        for ranges in cuts(layers):
            for replicas in shares(len(ranges), each) if len(ranges) <= each else ():
                for devices in every_device(tuple(aside * m for m in replicas), tuple(range(of.ranks))):
                    figured.note(least, ranges, devices)
                    if sum(devices, ()) == tuple(range(of.ranks)):
                        figured.note(in_order, ranges, devices)
        for placed in placed_blocks(Chain(of, of.divisions[0], 2.0), each, aside, own):
            figured.note(found, [(a, b + 1) for a, b in placed.stages], devices_of(placed.places, node))
        assert found == pytest.approx(least, rel=1e-12)
        better += any(in_order[count] > least[count] * (1 + 1e-9) for count in least)
    if (node, nodes, layers, aside) == (2, 2, 4, 1):
        assert better, "replicas that are not neighbours are never better"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 2])
def test_dapple_takes_no_longer_than_any_two_stages_by_its_own_formula(seed: int, nodes: int) -> None:
    """Nor less than the shortest of all cuts, replicas and places."""
    of = on_nodes(seed, 4 // nodes, nodes, 4.0 if nodes == 1 else 0.5, 5)
    two, every = math.inf, math.inf
    for each in (1, 2, 4):
        aside = of.ranks // each
        for count in (n for n in range(1, of.batch // aside + 1) if of.batch // aside % n == 0):
            figured = OnDevices(figures(of, of.batch / aside / count), 4 // nodes, 1.0 if nodes == 1 else 8.0, aside)
            for ranges in cuts(5):
                for replicas in shares(len(ranges), each) if len(ranges) <= each else ():
                    for devices in every_device(tuple(aside * m for m in replicas), tuple(range(of.ranks))):
                        seconds = figured.length(ranges, devices, count)
                        every, two = min(every, seconds), min(two, seconds if len(ranges) <= 2 else math.inf)
    found = PUBLISHED["dapple"](of)
    assert found is not None
    assert every * (1 - 1e-12) <= found.seconds <= two * (1 + 1e-12)


def test_dapple_tells_places_that_are_not_those_of_ranks() -> None:
    """The outer stages share a node, so that only two short messages go over the slow network."""
    of = on_nodes(23, 2, 2, 0.1, 5)
    found = PUBLISHED["dapple"](of)
    assert found is not None
    assert (found.replicas, found.needs[0].partition(": ")[2][:27]) == ((1, 1, 1, 1), "1+0, 0+1, 0+1, 1+0 of each ")
    alike = PUBLISHED["dapple"](on_nodes(23, 2, 2, 4.0, 5))
    assert alike is not None
    assert not alike.needs


def recursion(forward: list[float], backward: list[float], count: int) -> float:
    """The step by DAPPLE's public recursion; the end of the drain waits for the backward before, too."""
    stages = len(forward)

    @cache
    def f(m: int, x: int) -> float:
        if m < 0:
            return 0.0
        return max(f(m - 1, x), f(m, x - 1) if x else 0.0, b(m - stages + x, x)) + forward[x]

    @cache
    def b(m: int, x: int) -> float:
        if m < 0:
            return 0.0
        entering = b(m, x + 1) if x + 1 < stages else 0.0
        return max(entering, f(min(m + stages - x - 1, count - 1), x), b(m - 1, x)) + backward[x]

    return b(count - 1, 0)


def pivoted(forward: list[float], backward: list[float], count: int) -> float:
    """The step by the paper's formula with a pivot stage, which the planner does not use."""
    steady, pivot = [(count - 1) * (f + b) for f, b in zip(forward, backward, strict=True)], len(forward) - 1
    for stage in reversed(range(pivot)):
        if steady[stage] > steady[pivot] + sum(forward[stage + 1 : pivot]) + sum(backward[stage + 1 : pivot]):
            pivot = stage
    drain = max(sum(backward[stage : pivot + 1]) for stage in range(pivot + 1))
    return sum(forward[: pivot + 1]) + steady[pivot] + drain


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 16)])
def test_dapples_length_is_that_of_a_play_for_equal_stages_and_too_long_for_others(stages: int, count: int) -> None:
    """Its recursion is a play of 1f1b for any stages; the paper's pivot is as long as a play, or too short."""
    too_long, too_short, schedule = [0.0], [0.0], build("1f1b", stages, count)
    for seed in range(100):
        draw, equal = random.Random(seed), seed % 10 == 0
        forward = [1.3] * stages if equal else [draw.uniform(0.5, 1.5) for _ in range(stages)]
        backward = [2.1] * stages if equal else [draw.uniform(1.8, 2.2) * each for each in forward]
        played = simulate(schedule, StageCosts(forward, backward)).makespan
        assert recursion(forward, backward, count) == pytest.approx(played, rel=1e-12)
        of = problem(seed, layers=stages)
        kept = replace(of.divisions[0].kept[0], backward=tuple(Line(0.0, each) for each in backward))
        lines = tuple(Line(0.0, each) for each in forward)
        silent = replace(of.divisions[0], forward=lines, boundary=(0.0,) * stages, kept=(kept,))
        each_own = tuple((layer, layer) for layer in range(stages))
        nodes = nodes_of(of.links, stages)
        placed = Placed(each_own, (1,) * stages, nodes.in_order((1,) * stages))
        found = length(Chain(of, silent, 1.0), placed, count, 1, nodes) / played - 1
        pivot = pivoted(forward, backward, count) / played - 1
        if equal:
            assert (found, pivot) == pytest.approx((0.0, 0.0), abs=1e-12)
        too_long.append(found)
        too_short.append(-pivot)
    assert min(too_long) >= -1e-12
    assert min(too_short) >= -1e-12
    assert max(too_long) <= 0.14
    assert 0.1 <= max(too_short) <= 0.27


def divided_unlike(of: PlanningProblem, draw: random.Random) -> PlanningProblem:
    """Layers of which some gain nothing by being divided, with short messages between them."""
    whole, parts = of.divisions
    slower = [draw.choice([1.0, 3.0]) for _ in of.layers]
    few = tuple(each / 20 for each in whole.boundary)

    def slowed(lines: Sequence[Line]) -> tuple[Line, ...]:
        return tuple(Line(line.constant, line.each * times) for line, times in zip(lines, slower, strict=True))

    kept = tuple(replace(way, backward=slowed(way.backward)) for way in parts.kept)
    other = replace(parts, forward=slowed(parts.forward), kept=kept, boundary=few)
    return replace(of, divisions=(replace(whole, boundary=few), other))


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_alpa_finds_the_least_sum_with_the_slowest_stage(seed: int, uniform: bool) -> None:
    of, count = problem(seed, layers=4, tight=seed % 2 == 1), 4
    if seed >= 4:
        of = divided_unlike(of, random.Random(seed))
    best = []
    for ranges in cuts(4):
        for own in shares(len(ranges), 4):
            if any(n not in (1, 2, 4) for n in own):
                continue
            stages = [
                stage(of, first, end, n, count, len(ranges) - number - 1, uniform)
                for number, ((first, end), n) in enumerate(zip(ranges, own, strict=True))
            ]
            if None not in stages:
                times = [each for each in stages if each is not None]
                best.append(sum(times) + (count - 1) * max(times))
    found = pipelined(of, count, uniform=uniform)
    assert (found is None) == (not best)
    if found is not None:
        assert found[0] == pytest.approx(min(best), rel=1e-9)


def test_what_alpa_cannot_run_names_the_form_that_does() -> None:
    told = set[str | None]()
    for seed in range(8):
        of = divided_unlike(problem(seed, layers=4), random.Random(seed))
        answer = plan_by_alpa(of)
        assert answer is not None
        if "layers of a stage are divided differently" in "".join(answer.needs):
            told.add(form_that_runs(PlannerConfig("alpa"), of))
            assert form_that_runs(PlannerConfig("dapple"), of) is None
    assert "uniform" in told


def stage(
    of: PlanningProblem, first: int, end: int, devices: int, count: int, after: int, uniform: bool
) -> float | None:
    """The fastest way to run some layers on some devices, written anew: by all splits of each layer."""
    meshes = [each for each in of.divisions if devices % each.tensor == 0]
    meshes = [each for each in meshes if of.batch / count / (devices // each.tensor) >= 1]
    layers, options = range(first, end), []
    for splits in product(meshes, repeat=end - first):
        if uniform and len({each.tensor for each in splits}) > 1:
            continue
        replicas = [devices // each.tensor for each in splits]
        micro = [of.batch / count / each for each in replicas]
        for way in (0, 1):
            held = seconds = 0.0
            for layer, each, copies, samples in zip(layers, splits, replicas, micro, strict=True):
                time, weight, _ = figures(of, samples, each.tensor, way)[layer]
                saved = samples * each.kept[way].saved[layer].each * min(after + 1, count)
                held += 4 * weight + saved
                seconds += time + 2 * (copies - 1) * weight / copies / 4.0 / count
            for layer, (one, other) in zip(layers, pairwise(micro), strict=False):
                seconds += abs(one - other) * of.divisions[0].boundary[layer] / 4.0
            most = [max(micro)] if uniform else [of.batch / count / (devices // each.tensor) for each in meshes]
            if held + 0.1 * max(most) <= of.memory[4]:
                options.append(seconds)
    return min(options, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_the_program_inside_a_mesh_is_the_least_of_all_splits(seed: int) -> None:
    """Graphs of up to six nodes with up to four splits, of which memory allows some, all or none."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
    seconds = [[draw.uniform(0.1, 1.0) for _ in range(count)] for count in counts]
    sizes = [[draw.uniform(0.1, 1.0) for _ in range(count)] for count in counts]
    edges = {
        (one, other): [[draw.choice([0.0, draw.uniform(0.0, 0.5)]) for _ in range(counts[other])] for _ in range(wide)]
        for other in range(len(counts))
        for one, wide in enumerate(counts[:other])
        if draw.random() < 0.6
    }
    low, high = sum(map(min, sizes)), sum(map(max, sizes))
    limit = low + draw.uniform(-0.1, 1.0) * (high - low) - 1e-3 * (low == high)
    times = [
        sum(own[at] for own, at in zip(seconds, splits, strict=True))
        + sum(edge[splits[one]][splits[other]] for (one, other), edge in edges.items())
        for splits in product(*map(range, counts))
        if sum(own[at] for own, at in zip(sizes, splits, strict=True)) <= limit
    ]
    found = least(seconds, sizes, edges, limit)
    assert (found is None) == (not times)
    if found is not None:
        assert found[0] == pytest.approx(min(times), rel=1e-6)
        assert sum(own[at] for own, at in zip(sizes, found[1], strict=True)) <= limit * (1 + 1e-6)


def test_each_planner_answers_and_says_what_the_engine_lacks() -> None:
    for seed in range(2):
        of = problem(seed)
        for name, plan in PUBLISHED.items():
            answer = plan(of)
            assert answer is not None, name
            assert answer.planner == name
            covered = [layer for first, last in answer.stages for layer in range(first, last + 1)]
            assert covered == list(range(5)), name
            if not answer.needs:
                assert answer.world_size <= of.ranks, name
                assert of.batch % (answer.data * answer.microbatches) == 0 or name in FOR_EACH, name
            assert not answer.needs or "divided" in "".join(answer.needs), name
            if answer.turns:
                assert sum(answer.turns) == answer.pipeline, name
                assert answer.overrides({})["schedule.replicas"] == list(answer.turns), name
                assert answer.microbatches >= max(answer.turns), name


def test_what_a_user_has_fixed_is_kept_or_said_to_be_missed() -> None:
    of = problem(3)
    for plan in PUBLISHED.values():
        own = answer_of(plan, of)
        if own is None:
            continue
        assert answer_of(plan, replace(of, fixed={"pipeline": own.pipeline, "microbatches": own.microbatches})) == own
        missed = answer_of(plan, replace(of, fixed={"pipeline": own.pipeline + 1}))
        assert missed is not None
        told = f"parallelism.pipeline={own.pipeline + 1} is asked for, and it takes {own.pipeline}"
        assert missed.needs[-1].startswith(told)
        shared = answer_of(plan, replace(of, zero=(1,)))
        assert shared is not None
        assert shared.zero == (1 if shared.data > 1 else own.zero)


def wide(of: PlanningProblem) -> PlanningAnswer:
    """A user's planner that is right but for what a test replaces in its answer."""
    last, way = len(of.layers) - 1, of.divisions[0].kept[0].name
    return PlanningAnswer("wide", 1, of.ranks, 1, 1, None, ((0, last),), (way,), None, 1.0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"data": 10_000}, "must return a layout of at most "),
        ({"stages": ((1, 2),)}, "must return stages of layers 0 to "),
        ({"kept": ("nothing",)}, "must return one of "),
        ({"kept": ()}, "must return one of "),
        (None, "must return a PlanningAnswer, or None. It returned a dict"),
        ("raise", "must run with the arguments that it is given. Calling it raised KeyError"),
    ],
)
def test_what_a_planner_of_ones_own_does_wrong_is_one_line(
    wrong: dict[str, Any] | str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = problem(3)

    def plan(of: PlanningProblem, again: int = 0) -> Any:
        if wrong == "raise":
            raise KeyError(again)
        return replace(wide(of), **wrong) if isinstance(wrong, dict) else {}

    module = SimpleNamespace(wide=wide, plan=plan, kind=PlannerKind("a", wide))
    monkeypatch.setitem(sys.modules, "mine_of_planners", module)
    assert planner_of(PlannerConfig("mine", "mine_of_planners:wide"))(of) == replace(wide(of), planner="mine")
    assert planner_of(PlannerConfig("mine", "mine_of_planners:kind"))(of) == replace(wide(of), planner="mine")
    with pytest.raises(RequestError) as caught:
        planner_of(PlannerConfig("mine", "mine_of_planners:plan", {"again": 2}))(of)
    assert told in caught.value.problems[0].line()
    assert caught.value.problems[0].path == "planner.target"
