"""``planner=unity``: best-first search over substitutions, of layers' partitions and of operators; no pipeline.

A graph gives each layer its parts and replicas, which together are all devices. A substitution partitions a layer, or
a run of layers that are alike in it, into twice the parts and half the replicas, or combines them back. Graphs are
taken by their cost; one that costs more than 1.05 times the best is not looked at further. The cost is the layers'
seconds, what goes between neighbours that differ, and the sums of gradients. Where the best does not fit, cost and
bytes are weighed, and the weight is bisected. Layers that are partitioned differently are told, not run. Substitutions
inside layers (``kernels.substitutions``) are searched in the same way where no layer is partitioned: a graph is then a
set of them, and its cost the step of a whole plan, whose profile is of layers with them.

Source: Unger et al. 2022, Unity, and its public search (reconstruction on chains of layers).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from runner.plan.planners.kinds import PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, answer_of, with_microbatches
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["Costs", "Graph", "PLANNER", "best_graph", "best_substitutions", "plan"]

State = TypeVar("State", bound=tuple[Any, ...])

ALPHA = 1.05
"""How much more than the best a graph may cost that is looked at further."""

_BUDGET = 300  # graphs whose substitutions are made
_SETS = 3  # sets of substitutions inside layers that are added to: each addition costs a profile
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
    others = partial(substituted, places=costs.places)
    return _best_first(start, others, lambda graph: costs.weighed(graph, weight), alpha, budget)


def best_substitutions(
    names: Collection[str], seconds_of: Callable[[tuple[str, ...]], float], alpha: float = 1.0, budget: int = _SETS
) -> tuple[str, ...]:
    """The substitutions inside layers with the shortest step that the search finds; no set is longer than without any.

    Args:
        names: the substitutions that can be made.
        seconds_of: gives the seconds of a step with some of them, by name in ascending order; infinite if refused.
        alpha: how many times the best a set may cost that is added to.
        budget: the sets that are added to, at most.
    """

    def others(chosen: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        return (tuple(sorted((*chosen, name))) for name in names if name not in chosen)

    return _best_first((), others, seconds_of, alpha, budget)


def _best_first(
    start: State,
    others: Callable[[State], Iterable[State]],
    cost: Callable[[State], float],
    alpha: float,
    budget: int,
) -> State:
    best = cost(start), start
    queue, seen = [best], {start}
    for _ in range(budget):
        if not queue:
            break
        least, state = heapq.heappop(queue)
        if least > alpha * best[0]:
            break  # the others cost more
        for other in others(state):
            if other in seen:
                continue
            seen.add(other)
            made = cost(other), other
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
    chooses="parts and replicas of each layer, substitutions inside layers",
    by="best-first search over substitutions",
    lacks="pipelines, recomputation",
    position=60,
)
