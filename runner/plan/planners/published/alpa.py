"""``planner=alpa``: stages on meshes of 1, 2, 4, … devices, by dynamic programming, each split by an integer program.

The step is the sum of the stages and T - 1 times the slowest. More than 16 layers are first put together in as many
clusters, which are the nodes of the program: each is split into replicas and parts in its own way, and where that of
the next one differs, devices exchange the samples that they lack. ``planner.form=uniform`` splits all layers of a stage
alike. What comes after a stage bounds the micro-batches that it keeps.

Source: Zheng et al. 2022, Alpa (sections 4.2 and 5.2).
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

from runner.plan.planners.kinds import AGAIN, CUTS, PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.alpa_inside import fastest_on_chain, least
from runner.plan.planners.published.chain import Chain, answer_of, divisors, least_in_order, powers_of_two
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["OnMesh", "PLANNER", "clusters", "pipelined", "plan"]

_CLUSTERS = 16
_MIXED = "layers of a stage are divided differently, and the engine divides all layers among as many ranks"


class OnMesh(NamedTuple):
    """A stage on a mesh: its seconds for a micro-batch, first and last layer, replicas, parts and way to keep.

    If its layers are split differently, ``is_mixed``, replicas and parts are those of the layers with most parts.
    """

    seconds: float
    first: int
    last: int
    replicas: int
    tensor: int
    kept: int
    is_mixed: bool = False


def plan(problem: PlanningProblem, *, uniform: bool = False) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits. ``uniform``: all layers of a stage are split alike."""
    best: tuple[float, tuple[OnMesh, ...], int] | None = None
    for microbatches in divisors(problem.batch):
        found = pipelined(problem, microbatches, uniform=uniform)
        if found is not None and (best is None or found[0] < best[0]):
            best = *found, microbatches
    if best is None:
        return None
    seconds, stages, microbatches = best
    names = [kept.name for kept in problem.divisions[0].kept]
    replicas = tuple(stage.replicas for stage in stages)
    return answer_of(
        "alpa",
        problem,
        tuple((stage.first, stage.last) for stage in stages),
        replicas=replicas,
        tensor=tuple(stage.tensor for stage in stages),
        microbatches=microbatches,
        kept=tuple(names[stage.kept] for stage in stages),
        seconds=seconds,
        needs=(_MIXED,) if any(stage.is_mixed for stage in stages) else (),
    )


class _Split(NamedTuple):
    """What a mesh does with some clusters in one way to keep, if memory is not asked for."""

    seconds: float
    splits: tuple[int, ...]
    kept: int


class _Meshes:
    """The fastest stage of some clusters of layers on a mesh, for one number of micro-batches; each looked at once."""

    def __init__(
        self, problem: PlanningProblem, microbatches: int, ends: tuple[int, ...], *, uniform: bool, slowest: float
    ) -> None:
        self._problem, self._microbatches, self._ends = problem, microbatches, ends
        self._is_uniform, self._slowest = uniform, slowest
        self._chains: dict[tuple[int, int, int], Chain] = {}
        self._known: dict[tuple[int, int, int, int], OnMesh | None] = {}
        self._fastest: dict[tuple[int, int, int], list[_Split]] = {}
        self._splits = cache(self._splits_of)

    def of(self, first: int, end: int, devices: int, after: int) -> OnMesh | None:
        """The fastest stage of clusters on so many devices with so many stages after it; None if none fits."""
        key = first, end, devices, after
        if key not in self._known:
            in_flight = min(after + 1, self._microbatches)
            alike = self._uniform(first, end, devices, in_flight)
            self._known[key] = alike if self._is_uniform else self._faster(first, end, devices, in_flight, alike)
        return self._known[key]

    def _uniform(self, first: int, end: int, devices: int, in_flight: int) -> OnMesh | None:
        found, first, end = list[OnMesh](), self._ends[first], self._ends[end]
        for place, replicas in self._splits(devices):
            for way in range(self._ways):
                chain = self._chain(place, replicas, way)
                if chain.peak(first, end, in_flight) <= self._limit:
                    sums = chain.sum_seconds(first, end, replicas) / self._microbatches
                    seconds = chain.seconds(first, end) + sums
                    found.append(OnMesh(seconds, first, end - 1, replicas, chain.division.tensor, way))
        return min(found, default=None)

    def _faster(self, first: int, end: int, devices: int, in_flight: int, alike: OnMesh | None) -> OnMesh | None:
        """The fastest stage whose clusters may be split differently, or the one whose clusters are split alike."""
        splits = self._splits(devices)
        best: _Split | None = None
        for fastest in self._without_limit(first, end, devices):
            known = (each.seconds for each in (best, alike) if each is not None)
            if fastest.seconds >= min((self._slowest, *known)):
                break  # no way that follows can be faster
            way = fastest.kept
            chains = [self._chain(place, replicas, way) for place, replicas in splits]
            sizes = [
                [chain.held(*own) + in_flight * chain.total("saved", *own) for chain in chains]
                for own in pairwise(self._ends[first : end + 1])
            ]
            limit = self._limit - max(chain.working() for chain in chains)
            if sum(own[split] for own, split in zip(sizes, fastest.splits, strict=True)) <= limit:
                found: tuple[float, tuple[int, ...]] | None = (fastest.seconds, fastest.splits)
            elif limit > 0:
                edges = {(at, at + 1): edge for at, edge in enumerate(self._edges(first, end, devices))}
                found = least(self._seconds(first, end, devices, way), sizes, edges, limit)
            else:
                found = None
            if found is not None:
                best = min(best, _Split(*found, way)) if best is not None else _Split(*found, way)
        if best is None or (alike is not None and best.seconds >= alike.seconds):
            return alike
        place, replicas = max((splits[split] for split in best.splits), key=lambda own: -own[1])
        tensor, mixed = self._problem.divisions[place].tensor, len({*best.splits}) > 1
        return OnMesh(best.seconds, self._ends[first], self._ends[end] - 1, replicas, tensor, best.kept, mixed)

    def _without_limit(self, first: int, end: int, devices: int) -> list[_Split]:
        """The fastest splits of each way to keep, the fastest way first, if memory is not asked for."""
        key = first, end, devices
        if key not in self._fastest:
            edges = self._edges(first, end, devices)
            found = [
                _Split(*fastest_on_chain(self._seconds(first, end, devices, way), edges), way)
                for way in (range(self._ways) if self._splits(devices) else ())
            ]
            self._fastest[key] = sorted(found)
        return self._fastest[key]

    def _seconds(self, first: int, end: int, devices: int, way: int) -> list[list[float]]:
        """Seconds of each cluster for a micro-batch, with its part of the sums of gradients, by its splits."""
        chains = [(self._chain(place, replicas, way), replicas) for place, replicas in self._splits(devices)]
        return [
            [chain.seconds(*own) + chain.sum_seconds(*own, replicas) / self._microbatches for chain, replicas in chains]
            for own in pairwise(self._ends[first : end + 1])
        ]

    def _edges(self, first: int, end: int, devices: int) -> list[list[list[float]]]:
        """Seconds after each cluster but the last until devices have the samples of the next one, by both splits.

        Who has more samples than before receives them in the forward, and who has fewer their gradients in the
        backward.
        """
        samples, link = self._problem.batch / self._microbatches, self._problem.link
        shares = [1 / replicas for _, replicas in self._splits(devices)]
        lacking = [[abs(one - other) for other in shares] for one in shares]
        sizes = (samples * self._problem.divisions[0].boundary[at - 1] for at in self._ends[first + 1 : end])
        return [[[link.seconds(each * size) if each else 0.0 for each in own] for own in lacking] for size in sizes]

    def _splits_of(self, devices: int) -> list[tuple[int, int]]:
        """The places of the divisions that a mesh can have, with the replicas of each."""
        return [
            (place, devices // division.tensor)
            for place, division in enumerate(self._problem.divisions)
            if devices % division.tensor == 0
            and self._problem.batch / self._microbatches / (devices // division.tensor) >= 1
        ]

    @property
    def _ways(self) -> int:
        return len(self._problem.divisions[0].kept)

    @property
    def _limit(self) -> int:
        return self._problem.memory[self._problem.ranks]

    def _chain(self, place: int, replicas: int, way: int) -> Chain:
        key = place, replicas, way
        if key not in self._chains:
            samples = self._problem.batch / self._microbatches / replicas
            self._chains[key] = Chain(self._problem, self._problem.divisions[place], samples, way)
        return self._chains[key]


def clusters(problem: PlanningProblem) -> tuple[int, ...]:
    """The ends of clusters of layers, from 0: each layer is one, or as many as may be, evened by seconds."""
    layers = len(problem.layers)
    if layers <= _CLUSTERS:
        return tuple(range(layers + 1))
    chain = Chain(problem, problem.divisions[0], 1.0)
    cut = least_in_order([chain.ranges("forward") + chain.ranges("backward")] * _CLUSTERS)
    assert cut is not None  # there are more layers than clusters
    return (0, *(last + 1 for _, last in cut[1]))


def pipelined(problem: PlanningProblem, microbatches: int, *, uniform: bool) -> tuple[float, tuple[OnMesh, ...]] | None:
    """The least seconds of a step with so many micro-batches, and its stages; all devices are used."""
    alike = _pipelined(problem, microbatches, uniform=True)
    if uniform:
        return alike
    slowest = alike[0] / microbatches if alike is not None else math.inf
    found = _pipelined(problem, microbatches, uniform=False, slowest=slowest)
    return min((each for each in (alike, found) if each is not None), default=None)


def _pipelined(
    problem: PlanningProblem, microbatches: int, *, uniform: bool, slowest: float = math.inf
) -> tuple[float, tuple[OnMesh, ...]] | None:
    """The same, with stages that take less than ``slowest`` where their layers are split differently."""
    ends, sizes = clusters(problem), powers_of_two(problem.ranks)
    stage, count = _Meshes(problem, microbatches, ends, uniform=uniform, slowest=slowest), len(ends) - 1
    most = min(count, problem.ranks)
    stages = [
        made
        for first in range(count)
        for end in range(first + 1, count + 1)
        for n in sizes
        for after in range(most)
        if (made := stage.of(first, end, n, after)) is not None
    ]
    costs = sorted({made.seconds for made in stages})

    def under(slowest: float) -> tuple[float, tuple[OnMesh, ...]] | None:
        """The least step whose stages take at most so long."""

        @cache
        def rest(first: int, left: int, after: int) -> tuple[float, tuple[OnMesh, ...]] | None:
            """The least sum of the stages from ``first`` on, of which the first has ``after`` behind it."""
            if after < 0:
                return (0.0, ()) if first == count and left == 0 else None
            options = []
            for end in range(first + 1, count - after + 1):
                for n in sizes:
                    made = stage.of(first, end, n, after) if n <= left else None
                    behind = rest(end, left - n, after - 1) if made is not None and made.seconds <= slowest else None
                    if made is not None and behind is not None:
                        options.append((made.seconds + behind[0], (made, *behind[1])))
            return min(options, default=None)

        best: tuple[float, tuple[OnMesh, ...]] | None = None
        for number in range(1, most + 1):
            found = rest(0, problem.ranks, number - 1)
            if found is not None:
                whole = found[0] + (microbatches - 1) * max(each.seconds for each in found[1])
                best = min(best, (whole, found[1])) if best is not None else (whole, found[1])
        return best

    low, high = 0, len(costs)
    while low < high:  # below the first that has a step none has
        middle = (low + high) // 2
        low, high = (low, middle) if under(costs[middle]) is not None else (middle + 1, high)
    best: tuple[float, tuple[OnMesh, ...]] | None = None
    for slowest in costs[low:]:
        if best is not None and microbatches * slowest >= best[0]:
            break
        found = under(slowest)
        if found is not None:
            best = min(best, found) if best is not None else found
    return best


PLANNER = PlannerKind(
    name="alpa",
    plan=plan,
    axes=(
        PARTS,
        REPLICAS,
        CUTS,
        AGAIN,
    ),
    chooses="cut, replicas and parts of each stage, micro-batches, recomputation by stage",
    by="dynamic program under each slowest stage, and an integer program in each",
    lacks="bubbles of unlike stages: it is too long",
    position=50,
    forms={"uniform": partial(plan, uniform=True)},
)
