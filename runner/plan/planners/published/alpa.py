"""``planner=alpa``: the inter-operator level: stages on meshes of 1, 2, 4, … devices, by dynamic programming.

The step is the sum of the stages and T - 1 times the slowest; a stage of a mesh takes its best split into replicas and
parts (here the intra-operator level is that choice). What comes after a stage bounds the micro-batches that it keeps.

Source: Zheng et al. 2022, Alpa (section 5.2).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from runner.plan.planners.published.chain import Chain, answer_of, divisors, powers_of_two
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["OnMesh", "meshes", "pipelined", "plan"]


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


def meshes(
    problem: PlanningProblem, first: int, end: int, devices: int, microbatches: int, after: int
) -> OnMesh | None:
    """The fastest stage of these layers on so many devices with so many stages after it; None if none fits."""
    found = []
    for division in problem.divisions:
        replicas, rest = divmod(devices, division.tensor)
        samples = problem.batch / microbatches / max(replicas, 1)
        if rest or samples < 1:
            continue
        for way in range(len(division.kept)):
            chain = Chain(problem, division, samples, way)
            if chain.peak(first, end, min(after + 1, microbatches)) <= problem.memory[problem.ranks]:
                sums = chain.sum_seconds(first, end, replicas) / microbatches
                seconds = chain.seconds(first, end) + sums
                found.append(OnMesh(seconds, first, end - 1, replicas, division.tensor, way))
    return min(found, default=None)


def pipelined(problem: PlanningProblem, microbatches: int) -> tuple[float, tuple[OnMesh, ...]] | None:
    """The least seconds of a step with so many micro-batches, and its stages; all devices are used."""
    layers, sizes = len(problem.layers), powers_of_two(problem.ranks)
    stage = cache(lambda first, end, n, after: meshes(problem, first, end, n, microbatches, after))
    most = min(layers, problem.ranks)
    costs = sorted(
        {
            made.seconds
            for first in range(layers)
            for end in range(first + 1, layers + 1)
            for n in sizes
            for after in range(most)
            if (made := stage(first, end, n, after)) is not None
        }
    )
    best: tuple[float, tuple[OnMesh, ...]] | None = None
    for slowest in costs:
        if best is not None and microbatches * slowest >= best[0]:
            break

        @cache
        def rest(
            first: int, left: int, after: int, slowest: float = slowest
        ) -> tuple[float, tuple[OnMesh, ...]] | None:
            """The least sum of the stages from ``first`` on, of which the first has ``after`` behind it."""
            if after < 0:
                return (0.0, ()) if first == layers and left == 0 else None
            options = []
            for end in range(first + 1, layers + 1):
                for n in sizes:
                    made = stage(first, end, n, after) if n <= left else None
                    behind = rest(end, left - n, after - 1) if made is not None and made.seconds <= slowest else None
                    if made is not None and behind is not None:
                        options.append((made.seconds + behind[0], (made, *behind[1])))
            return min(options, default=None)

        for count in range(1, most + 1):
            found = rest(0, problem.ranks, count - 1)
            if found is not None:
                whole = found[0] + (microbatches - 1) * max(each.seconds for each in found[1])
                best = min(best, (whole, found[1])) if best is not None else (whole, found[1])
    return best
