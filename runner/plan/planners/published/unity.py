"""``planner=unity``: best-first search over substitutions that partition layers more or less; no pipeline.

A graph gives each layer its parts and replicas, which together are all devices. A substitution partitions a layer, or
a run of layers that are alike in it, into twice the parts and half the replicas, or combines them back. Graphs are
taken by their cost; one that costs more than 1.05 times the best is not looked at further. The cost is the layers'
seconds, what goes between neighbours that differ, and the sums of gradients. Where the best does not fit, cost and
bytes are weighed, and the weight is bisected. Substitutions inside layers need their graphs, which the problem does
not have: ``kernels.substitutions`` makes them, and the problem is then of layers with them. Layers that are partitioned
differently are told, not run.

Source: Unger et al. 2022, Unity, and its public search (reconstruction on chains of layers).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from runner.plan.planners.kinds import PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, answer_of, with_microbatches
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["Costs", "Graph", "PLANNER", "best_graph", "plan"]

ALPHA = 1.05
"""How much more than the best a graph may cost that is looked at further."""

_BUDGET = 300  # graphs whose substitutions are made
_HALVINGS = 12  # of the weight of bytes

Graph = tuple[int, ...]
"""For each layer the place of its division."""

_APART = "its layers are divided differently, and the engine divides all layers among as many ranks"


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    costs, limit = Costs(problem, count), problem.memory[problem.ranks]
    graph = best_graph(costs, 0.0)
    if costs.size(graph) > limit:
        low, high, fitting = 0.0, 1.0, None
        for _ in range(_HALVINGS):
            weight = (low + high) / 2
            graph = best_graph(costs, weight)
            if costs.size(graph) <= limit:
                high = weight
                fitting = graph if fitting is None or costs.seconds(graph) < costs.seconds(fitting) else fitting
            else:
                low = weight
        if fitting is None:
            return None
        graph = fitting
    tensors = [problem.divisions[place].tensor for place in graph]
    least = min(tensors)
    return answer_of(
        "unity",
        problem,
        ((0, len(graph) - 1),),
        replicas=(problem.ranks // least,),
        tensor=(least,),
        microbatches=max(1, costs.count * least // problem.ranks),
        kept=(problem.divisions[0].kept[0].name,),
        seconds=costs.seconds(graph),
        peak_bytes=costs.size(graph),
        needs=() if len(set(tensors)) == 1 else (_APART,),
    )


@dataclass
class Costs:
    """Seconds and bytes of graphs.

    Args:
        problem: the problem.
        count: micro-batches of a step over all replicas.
    """

    problem: PlanningProblem
    count: int

    @property
    def places(self) -> range:
        """The divisions that a layer may have, the least parts first."""
        return range(len(self.problem.divisions))

    @cached_property
    def of_layer(self) -> list[list[tuple[float, float]]]:
        """For each division and layer its seconds of a step and its bytes on a device."""
        problem, found = self.problem, []
        for division in problem.divisions:
            data = max(problem.ranks // division.tensor, 1)
            chain = Chain(problem, division, problem.batch / self.count)
            turns = max(self.count / data, 1.0)
            rows = []
            for at in range(len(problem.layers)):
                seconds = turns * chain.seconds(at, at + 1) + chain.sum_seconds(at, at + 1, data)
                rows.append((seconds, chain.held(at, at + 1) + chain.total("saved", at, at + 1)))
            found.append(rows)
        return found

    @cached_property
    def between(self) -> list[float]:
        """Seconds behind each layer where the next one is divided differently: a share goes, and its gradient comes."""
        problem, division = self.problem, self.problem.divisions[0]
        each = problem.batch / self.count
        turns = max(self.count / problem.ranks, 1.0)
        return [2 * turns * problem.link.seconds(each * size) for size in division.boundary]

    @cached_property
    def working(self) -> float:
        """The most bytes of a layer beside what it saves, in any division."""
        problem = self.problem
        return max(Chain(problem, each, problem.batch / self.count).working() for each in problem.divisions)

    def seconds(self, graph: Graph) -> float:
        """Seconds of a step."""
        own = sum(self.of_layer[place][at][0] for at, place in enumerate(graph))
        return own + sum(
            self.between[at] for at, (one, two) in enumerate(zip(graph, graph[1:], strict=False)) if one != two
        )

    def size(self, graph: Graph) -> float:
        """Bytes of a device."""
        return self.working + sum(self.of_layer[place][at][1] for at, place in enumerate(graph))

    def weighed(self, graph: Graph, weight: float) -> float:
        """Seconds and bytes as parts of those of the graph that divides nothing, by the weight of the bytes."""
        whole = (0,) * len(graph)
        return (1 - weight) * self.seconds(graph) / self.seconds(whole) + weight * self.size(graph) / self.size(whole)


def best_graph(costs: Costs, weight: float, alpha: float = ALPHA, budget: int = _BUDGET) -> Graph:
    """The graph with the least cost that the search finds."""
    start: Graph = (0,) * len(costs.problem.layers)
    best = costs.weighed(start, weight), start
    queue, seen = [best], {start}
    for _ in range(budget):
        if not queue:
            break
        cost, graph = heapq.heappop(queue)
        if cost > alpha * best[0]:
            break  # the others cost more
        for other in substituted(graph, costs.places):
            if other in seen:
                continue
            seen.add(other)
            made = costs.weighed(other, weight), other
            best = min(best, made)
            if made[0] <= alpha * best[0]:
                heapq.heappush(queue, made)
    return best[1]


def substituted(graph: Graph, places: range) -> Iterator[Graph]:
    """Every graph that follows by one substitution: of a layer, of a run of layers that are alike, or of all."""
    runs, first = list[tuple[int, int]](), 0
    for at in range(1, len(graph) + 1):
        if at == len(graph) or graph[at] != graph[first]:
            runs.append((first, at))
            first = at
    layers = [(at, at + 1) for at in range(len(graph))]
    for first, end in dict.fromkeys([*runs, *layers]):
        for place in (graph[first] - 1, graph[first] + 1):
            if place in places:
                yield (*graph[:first], *([place] * (end - first)), *graph[end:])


PLANNER = PlannerKind(
    name="unity",
    plan=plan,
    axes=(
        PARTS,
        REPLICAS,
    ),
    chooses="parts and replicas of each layer",
    by="best-first search over substitutions",
    lacks="pipelines, recomputation",
    position=60,
)
