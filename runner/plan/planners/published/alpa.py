"""``planner=alpa``: the inter-operator level: stages on meshes of 1, 2, 4, … devices, by dynamic programming.

The step is the sum of the stages and T - 1 times the slowest; a stage of a mesh takes its best split into replicas and
parts (here the intra-operator level is that choice). More than 16 layers are first put together in as many clusters.
What comes after a stage bounds the micro-batches that it keeps.

Source: Zheng et al. 2022, Alpa (section 5.2).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from runner.plan.planners.kinds import AGAIN, CUTS, PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, answer_of, divisors, least_in_order, powers_of_two
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["OnMesh", "PLANNER", "clusters", "pipelined", "plan"]

_CLUSTERS = 16


class OnMesh(NamedTuple):
    """A stage on a mesh: its seconds for a micro-batch, first and last layer, replicas, parts and way to keep."""

    seconds: float
    first: int
    last: int
    replicas: int
    tensor: int
    kept: int


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    best: tuple[float, tuple[OnMesh, ...], int] | None = None
    for microbatches in divisors(problem.batch):
        found = pipelined(problem, microbatches)
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
    )


class _Meshes:
    """The fastest stage of some clusters of layers on a mesh, for one number of micro-batches; each looked at once."""

    def __init__(self, problem: PlanningProblem, microbatches: int, ends: tuple[int, ...]) -> None:
        self._problem, self._microbatches, self._ends = problem, microbatches, ends
        self._chains: dict[tuple[int, int, int], Chain] = {}
        self._known: dict[tuple[int, int, int, int], OnMesh | None] = {}

    def of(self, first: int, end: int, devices: int, after: int) -> OnMesh | None:
        """The fastest stage of clusters on so many devices with so many stages after it; None if none fits."""
        key = first, end, devices, after
        if key not in self._known:
            self._known[key] = self._of(self._ends[first], self._ends[end], devices, after)
        return self._known[key]

    def _of(self, first: int, end: int, devices: int, after: int) -> OnMesh | None:
        problem, found = self._problem, list[OnMesh]()
        for place, division in enumerate(problem.divisions):
            replicas, rest = divmod(devices, division.tensor)
            if rest or problem.batch / self._microbatches / max(replicas, 1) < 1:
                continue
            for way in range(len(division.kept)):
                chain = self._chain(place, replicas, way)
                if chain.peak(first, end, min(after + 1, self._microbatches)) <= problem.memory[problem.ranks]:
                    sums = chain.sum_seconds(first, end, replicas) / self._microbatches
                    seconds = chain.seconds(first, end) + sums
                    found.append(OnMesh(seconds, first, end - 1, replicas, division.tensor, way))
        return min(found, default=None)

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


def pipelined(problem: PlanningProblem, microbatches: int) -> tuple[float, tuple[OnMesh, ...]] | None:
    """The least seconds of a step with so many micro-batches, and its stages; all devices are used."""
    ends, sizes = clusters(problem), powers_of_two(problem.ranks)
    stage, count = _Meshes(problem, microbatches, ends), len(ends) - 1
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
    by="dynamic program under each slowest stage",
    lacks="bubbles of unlike stages: it is too long",
    position=50,
)
