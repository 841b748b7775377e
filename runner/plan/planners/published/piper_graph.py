"""Piper's dynamic program on a graph of layers, of which a chain is one kind.

A stage is the difference of two sets of layers, each of which has all layers behind its own ones. So stages can be in a
row, and every message goes to a later one. States are these sets, the devices, and the replicas of all stages of a set.
A user's model comes to planners as a chain: ``planner=piper`` does the same with sums over ranges
(:mod:`runner.plan.planners.published.piper`), and a test holds that both agree there.

Source: Tarnawski et al. 2021, Piper, and the format of its public program's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, product

import numpy as np

from runner.plan.planners.published.chain import divisors
from runner.schedule.simulation.batched import Numbers

__all__ = ["GraphStage", "LayerGraph", "LayerWay", "search_graph"]

_SETS = 40_000  # as many as the public program looks at


@dataclass(frozen=True, slots=True)
class LayerWay:
    """One way to run a layer on the devices that divide it.

    Args:
        seconds: how long a forward and a backward of a micro-batch take.
        weight: bytes on each of the devices that replicas sum up.
        saved: bytes for each micro-batch in flight.
        held: bytes besides.
        enters, leaves: bytes of a micro-batch that an edge to or from a stage's layer takes beside its own, by the
            layer at its other end.
    """

    seconds: float
    weight: float
    saved: float
    held: float
    enters: Mapping[int, float] = field(default_factory=dict)
    leaves: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers, what each gives to others, and the devices that they may be on.

    Args:
        layers: for each layer its ways, at most two, by the number of devices that divide it.
        edges: pairs of layers, with the bytes of a micro-batch that the first gives to the second.
        devices: the number of devices.
        memory: bytes of one of them.
        bytes_per_second: the speed of each device's link; None: messages and sums take nothing.
        count: micro-batches of a step.
    """

    layers: tuple[Mapping[int, tuple[LayerWay, ...]], ...]
    edges: Mapping[tuple[int, int], float]
    devices: int
    memory: float
    bytes_per_second: float | None
    count: int


@dataclass(frozen=True, slots=True)
class GraphStage:
    """A stage: its layers, the devices that divide each, its replicas, and the place of each layer's way."""

    layers: tuple[int, ...]
    tensor: int
    replicas: int
    ways: tuple[int, ...]


def search_graph(graph: LayerGraph, *, exact: bool = False) -> tuple[float, tuple[GraphStage, ...]] | None:
    """The least seconds of the slowest stage for a micro-batch, and the stages in their order.

    Args:
        graph: the layers and devices.
        exact: whether the ways of a stage's layers are the fastest that fit. Else each is the fastest, and if these do
            not fit, layers change by the least seconds for a byte until they do, as in the public program.

    Returns:
        None if nothing fits.

    Raises:
        ValueError: the graph has a circle, a layer more than two ways, or there are too many sets of layers.
    """
    if any(len(ways) > 2 for layer in graph.layers for ways in layer.values()):
        raise ValueError("a layer has more than two ways to run")
    most = min(graph.devices, graph.count)
    replicas = [data for data in divisors(graph.count) if data <= most]
    degrees = sorted({tensor for layer in graph.layers for tensor in layer})
    sets, shape = _sets(graph), (graph.devices + 1, most + 1)
    best = np.full((len(sets), *shape), np.inf)
    best[0, 0, 0] = 0.0
    came = np.zeros((len(sets), *shape, 3), dtype=np.int32)  # the set behind, parts of layers, replicas
    for at, before in combinations(range(len(sets)), 2):
        behind, whole = sets[at], sets[before]
        if behind & ~whole:
            continue
        stage = _members(whole & ~behind)
        for tensor, data in product(degrees, replicas):
            if tensor * data > graph.devices or any(tensor not in graph.layers[layer] for layer in stage):
                continue
            flights = -(-np.arange(data, most + 1) // data)
            seconds = _Ways(graph, stage, tensor, data).seconds(int(flights[-1]), exact=exact)[flights - 1]
            after = best[at, : shape[0] - tensor * data, : shape[1] - data]
            worst = np.maximum(after, seconds[None, :])
            mine = best[before, tensor * data :, data:]
            better = worst < mine
            mine[better] = worst[better]
            came[before, tensor * data :, data:][better] = at, tensor, data
    left, sharing = (int(each) for each in np.unravel_index(best[-1].argmin(), shape))
    least, at = float(best[-1, left, sharing]), len(sets) - 1
    if not np.isfinite(least):
        return None
    stages = list[GraphStage]()
    while at:
        behind, tensor, data = came[at, left, sharing].tolist()
        layers = _members(sets[at] & ~sets[behind])
        ways = _Ways(graph, layers, tensor, data).chosen(-(-sharing // data), exact=exact)
        assert ways is not None  # it fits
        stages.append(GraphStage(layers, tensor, data, tuple(ways)))
        at, left, sharing = behind, left - tensor * data, sharing - data
    return least, tuple(stages)


def _sets(graph: LayerGraph) -> list[int]:
    """All sets of layers, as bits, that have every layer behind their own; each after its parts."""
    needs = [0] * len(graph.layers)
    for one, other in graph.edges:
        needs[one] |= 1 << other
    found, new = {0}, {0}
    while new:
        new = {
            known | 1 << layer
            for known in new
            for layer, behind in enumerate(needs)
            if not known >> layer & 1 and not behind & ~known
        }
        found |= new
        if len(found) > _SETS:
            raise ValueError(f"the graph has more than {_SETS:,} sets of layers with all that are behind them")
    if (1 << len(graph.layers)) - 1 not in found:
        raise ValueError("the graph has a circle")
    return sorted(found, key=lambda each: (each.bit_count(), each))


def _members(layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers.bit_length()) if layers >> layer & 1)


class _Ways:
    """The ways of a stage's layers, of which each has two here: seconds of the stage for a micro-batch, and bytes."""

    def __init__(self, graph: LayerGraph, stage: Sequence[int], tensor: int, data: int) -> None:
        self._memory, own = graph.memory, set(stage)
        per_byte = 1 / graph.bytes_per_second if graph.bytes_per_second else 0.0
        cut = [(*edge, size) for edge, size in graph.edges.items() if len(own.intersection(edge)) == 1]

        def row(layer: int, way: LayerWay) -> tuple[float, float, float]:
            sent = sum(size + way.enters.get(one, 0.0) for one, other, size in cut if other == layer)
            sent += sum(size + way.leaves.get(other, 0.0) for one, other, size in cut if one == layer)
            sums = 4 * (data - 1) * way.weight / (data * graph.count)
            return (way.seconds + 2 * sent * per_byte) / data + sums * per_byte, way.saved, way.held

        ways = [(layer, graph.layers[layer][tensor]) for layer in stage]
        rows = [[row(layer, each) for each in (own[0], own[-1])] for layer, own in ways]
        self._seconds, self._saved, self._held = np.moveaxis(np.array(rows), 2, 0)
        self._fastest = self._seconds.argmin(axis=1)

    def seconds(self, most: int, *, exact: bool) -> Numbers:
        """Seconds by the number of micro-batches in flight, from 1 to ``most``; infinite where nothing fits."""
        found = np.full(most, np.inf)
        for flight in range(1, most + 1):
            if (chosen := self.chosen(flight, exact=exact)) is None:
                break  # nor does it with more
            found[flight - 1] = self._sum(self._seconds, chosen)
        return found

    @staticmethod
    def _sum(values: Numbers, chosen: Sequence[int]) -> float:
        return float(values[np.arange(len(chosen)), chosen].sum())

    def chosen(self, flight: int, *, exact: bool) -> list[int] | None:
        """The place of each layer's way with so many micro-batches in flight; None if nothing fits."""
        size = flight * self._saved + self._held
        found: list[int] = self._fastest.tolist()
        lacks = self._sum(size, found) - self._memory
        if lacks > 0:
            if size.min(axis=1).sum() > self._memory:
                return None
            pairs = [(own, 1 - own) for own in found]
            saves = [each[one] - each[other] for each, (one, other) in zip(size.tolist(), pairs, strict=True)]
            extra = [each[other] - each[one] for each, (one, other) in zip(self._seconds.tolist(), pairs, strict=True)]
            useful = [layer for layer, bytes_ in enumerate(saves) if bytes_ > 0]
            useful.sort(key=lambda layer: extra[layer] / saves[layer])
            for layer in _least(saves, extra, useful, lacks) if exact else _first(saves, useful, lacks):
                found[layer] = 1 - found[layer]
        return found


def _first(saves: Sequence[float], items: Sequence[int], lacks: float) -> Sequence[int]:
    """Items from the first on, until they save what lacks."""
    sums = list(accumulate(saves[item] for item in items))
    return items[: next((at for at, each in enumerate(sums) if each > lacks - 1e-9), len(items)) + 1]


def _least(saves: Sequence[float], extra: Sequence[float], items: Sequence[int], lacks: float) -> Sequence[int]:
    """The items that save what lacks with the least extra seconds, by the sets that no other one is better than."""
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for item in items:
        both = [*front, *((added + extra[item], saved + saves[item], (*own, item)) for added, saved, own in front)]
        both.sort(key=lambda each: (each[0], -each[1]))
        front, most = [], -1.0
        for each in both:
            if each[1] > most:
                front.append(each)
                most = min(each[1], lacks)  # more than what lacks is no better
    return next((own for _, saved, own in front if saved >= lacks), tuple(items))  # lacks, but for rounding: all
