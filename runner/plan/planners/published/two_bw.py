"""``planner=2bw``: every depth, width and power-of-two micro-batch, with even blocks and recomputation for all or none.

The step is the slowest stage, or its sum of gradients if that is longer; two versions of weights are kept.

Source: Narayanan et al. 2021, PipeDream-2BW (reconstruction: the public planner enumerates).
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.plan.planners.kinds import AGAIN, CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, even_cut, powers_of_two
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "plan", "settings"]

Setting = tuple[float, float, Stages, int, int, int]
"""Seconds, bytes, stages, width, micro-batches and the place of the way to keep."""


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    found = min(settings(problem), default=None)
    if found is None:
        return None
    seconds, size, stages, width, microbatches, way = found
    kept = (problem.divisions[0].kept[way].name,) * len(stages)
    return answer_of(
        "2bw",
        problem,
        stages,
        replicas=(width,) * len(stages),
        tensor=(1,) * len(stages),
        microbatches=microbatches,
        kept=kept,
        seconds=seconds,
        peak_bytes=size,
    )


def settings(problem: PlanningProblem) -> Iterator[Setting]:
    """Every setting that fits."""
    division, layers = problem.divisions[0], len(problem.layers)
    names = [kept.name for kept in division.kept]
    ways = [names.index(name) for name in ("none", "full") if name in names] or [0]
    for depth in range(1, min(layers, problem.ranks) + 1):
        stages = even_cut(layers, depth, last_more=True)
        for width in range(1, problem.ranks // depth + 1):
            for samples in powers_of_two(problem.batch // width):
                if problem.batch % (width * samples):
                    continue
                microbatches = problem.batch // (width * samples)
                for way in ways:
                    chain = Chain(problem, division, samples, way)
                    size = max(_bytes(chain, first, last + 1, depth) for first, last in stages)
                    if size <= problem.memory[_ranks(problem, depth * width)]:
                        yield _seconds(chain, stages, width, microbatches), size, stages, width, microbatches, way


def _ranks(problem: PlanningProblem, count: int) -> int:
    """The least known number of ranks that holds so many."""
    return min(each for each in problem.memory if each >= count)


def _bytes(chain: Chain, first: int, end: int, depth: int) -> float:
    older = chain.total("weight", first, end)
    return older + chain.peak(first, end, depth)


def _seconds(chain: Chain, stages: Stages, width: int, microbatches: int) -> float:
    each = []
    for first, last in stages:
        messages = sum(2 * chain.message(end) for end in (first, last + 1) if 0 < end < len(chain.problem.layers))
        sums = chain.sum_seconds(first, last + 1, width) / microbatches
        each.append(max(chain.seconds(first, last + 1) + messages, sums))
    return microbatches * max(each)


PLANNER = PlannerKind(
    name="2bw",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
        AGAIN,
    ),
    chooses="depth, width, micro-batch, recomputation of all or none",
    by="enumeration of even blocks",
    lacks="filling the pipeline",
    position=30,
)
