"""Piper on graphs of layers, against all rows of stages with all replicas, parts and ways to run; chains as chains."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import inf

import pytest
from planning_problems import problem

from runner.plan.planners.published.piper import search
from runner.plan.planners.published.piper_graph import LayerGraph, LayerWay, search_graph

Chosen = tuple[int, ...]


def drawn(seed: int, layers: int, devices: int, share: float) -> LayerGraph:
    """A graph whose layers give to later ones, where one device has a part of what all need."""
    draw = random.Random(seed)
    edges = {
        (one, other): draw.uniform(0.05, 1.0)
        for one, other in combinations(range(layers), 2)
        if other == one + 1 and draw.random() < 0.8 or draw.random() < share
    }

    def ways(seconds: float, weight: float, saved: float, tensor: int) -> tuple[LayerWay, ...]:
        more = dict.fromkeys(range(layers), 0.1 * (tensor - 1))
        keep = LayerWay((seconds + 0.05 * tensor) / tensor, weight / tensor, saved / tensor, 4 * weight / tensor, more)
        again = LayerWay(keep.seconds * 4 / 3, keep.weight, 0.2 * keep.saved, keep.held + 0.1 * keep.saved, more)
        return keep, again

    of = []
    for _ in range(layers):
        figures = draw.uniform(1.0, 6.0), draw.uniform(0.5, 3.0), draw.uniform(0.5, 4.0)
        of.append({tensor: ways(*figures, tensor) for tensor in (1, 2)})
    memory = draw.uniform(1.2, 3.0) * sum(layer[1][0].held for layer in of) / devices
    return LayerGraph(tuple(of), edges, devices, memory, 8.0, devices)


def all_ways(seconds: Callable[[Chosen], float], layers: int, ratio: Callable[[int], float]) -> float:
    """The fastest of all ways of the layers that fit."""
    return min(map(seconds, product((0, 1), repeat=layers)))


def by_ratio(seconds: Callable[[Chosen], float], layers: int, ratio: Callable[[int], float]) -> float:
    """The first that fits, if layers change by the least seconds for a byte."""
    order = sorted(range(layers), key=ratio)
    sets = (tuple(int(layer in order[:count]) for layer in range(layers)) for count in range(layers + 1))
    return next((each for each in map(seconds, sets) if each < inf), inf)


def least(graph: LayerGraph, knapsack: Callable[..., float]) -> float:
    """The slowest stage of the best of all rows of stages, each with all replicas and parts."""
    layers = range(len(graph.layers))

    @cache
    def fastest(stage: frozenset[int], tensor: int, data: int, flight: int) -> float:
        own = sorted(stage)

        def seconds(chosen: Chosen) -> float:
            ways = {layer: graph.layers[layer][tensor][way] for layer, way in zip(own, chosen, strict=True)}
            if sum(flight * way.saved + way.held for way in ways.values()) > graph.memory:
                return inf
            sent = 0.0
            for (one, other), size in graph.edges.items():
                if other in stage and one not in stage:
                    sent += size + ways[other].enters[one]
                if one in stage and other not in stage:
                    sent += size
            sums = 4 * (data - 1) * sum(way.weight for way in ways.values()) / (data * graph.count)
            return (sum(way.seconds for way in ways.values()) + 2 * sent / 8.0) / data + sums / 8.0

        def ratio(at: int) -> float:
            keep, again = graph.layers[own[at]][tensor]
            return (again.seconds - keep.seconds) / (flight * (keep.saved - again.saved) + keep.held - again.held)

        return knapsack(seconds, len(own), ratio)

    def stages_before(behind: frozenset[int]) -> Iterator[frozenset[int]]:
        """Every set of other layers, all of whose edges lead to layers of the set or behind."""
        left = [layer for layer in layers if layer not in behind]
        for count in range(1, len(left) + 1):
            for stage in map(frozenset, combinations(left, count)):
                if all(other in stage | behind for one, other in graph.edges if one in stage):
                    yield stage

    found = inf

    def extend(behind: frozenset[int], devices: int, sharing: int, slowest: float) -> None:
        nonlocal found
        if len(behind) == len(layers):
            found = min(found, slowest)
            return
        for stage in stages_before(behind):
            for tensor, data in product((1, 2), range(1, graph.count + 1)):
                total = sharing + data
                if graph.count % data or tensor * data > devices or total > graph.count:
                    continue
                worst = max(slowest, fastest(stage, tensor, data, -(-total // data)))
                if worst < found:
                    extend(behind | stage, devices - tensor * data, total, worst)

    extend(frozenset(), graph.devices, 0, 0.0)
    return found


@pytest.mark.parametrize(
    ("layers", "devices", "share", "seeds"),
    [
        (5, 4, 0.0, range(10)),
        (5, 4, 0.3, range(10)),
        (6, 4, 0.2, range(6)),
        (8, 8, 0.5, range(4)),
        pytest.param(8, 8, 0.3, range(12), marks=pytest.mark.costly),
    ],
)
def test_all_rows_of_stages_have_no_faster_slowest_stage(layers: int, devices: int, share: float, seeds: range) -> None:
    """With the fastest ways that fit, and with those of the public program, which take longer where layers are few."""
    gaps = []
    for seed in seeds:
        graph = drawn(seed, layers, devices, share)
        best, same = least(graph, all_ways), least(graph, by_ratio)
        exact, found = search_graph(graph, exact=True), search_graph(graph)
        assert (exact is None, found is None) == (best == inf, same == inf)
        if exact is not None and found is not None:
            assert exact[0] == pytest.approx(best, rel=1e-9)
            assert found[0] == pytest.approx(same, rel=1e-9)
            gaps.append(found[0] / exact[0] - 1)
            for _, stages in (exact, found):
                assert sorted(layer for stage in stages for layer in stage.layers) == list(range(layers))
                assert sum(stage.tensor * stage.replicas for stage in stages) <= devices
                place = {layer: at for at, stage in enumerate(stages) for layer in stage.layers}
                assert all(place[one] <= place[other] for one, other in graph.edges)
    assert min(gaps) >= -1e-12
    assert sum(gaps) / len(gaps) <= 0.03


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_one_kind_of_graph(seed: int) -> None:
    of = problem(seed, layers=6, ranks=4)
    limit = int(1.7 * sum(of.divisions[0].weight)) + 1
    of = replace(of, memory={1: limit, 2: limit, 4: limit})
    samples = of.batch / 4
    layers = []
    for at in range(6):
        by_degree = {}
        for division in of.divisions:
            by_degree[division.tensor] = tuple(
                LayerWay(
                    division.forward[at].of(samples) + kept.backward[at].of(samples),
                    division.weight[at],
                    kept.saved[at].of(samples),
                    division.weight[at] + division.gradient[at] + division.state[at],
                )
                for kept in division.kept
            )
        layers.append(by_degree)
    edges = {(at, at + 1): samples * of.divisions[0].boundary[at] for at in range(5)}
    room = limit - samples * 0.1  # the most that a layer takes while it runs
    found, same = search(of, 4), search_graph(LayerGraph(tuple(layers), edges, 4, room, 4.0, 4))
    assert (found is None) == (same is None)
    if found is not None and same is not None:
        assert same[0] == pytest.approx(found[0], rel=1e-9)


def test_what_is_no_graph_of_layers_is_told() -> None:
    graph = drawn(0, 3, 2, 0.0)
    with pytest.raises(ValueError, match="a circle"):
        search_graph(LayerGraph(graph.layers, {(0, 1): 1.0, (1, 0): 1.0}, 2, 1e9, None, 2))
    three = ({1: graph.layers[0][1] * 2},)
    with pytest.raises(ValueError, match="more than two ways"):
        search_graph(LayerGraph(three, {}, 2, 1e9, None, 2))
    with pytest.raises(ValueError, match="more than 40,000 sets"):
        search_graph(LayerGraph((graph.layers[0],) * 17, {}, 2, 1e9, None, 2))
