"""``planner=hetpipe``: workers that are pipelines with N_m micro-batches under way; the slowest stage is the least.

For every size of a worker and every N_m, the cut whose slowest stage takes least among those in which each stage fits
what it holds: at most as many micro-batches as pass between its forward and its backward. The paper's linear program
over 0 and 1 has the same solutions; on a chain a dynamic program is exact. A worker's micro-batch takes the slowest
stage, or the way through all stages over N_m. A step pushes and pulls the weights of each stage once (distance 0).
All devices are alike here, so the grouping of unlike ones into workers is none.

Source: Park et al. 2020, HetPipe, as the surveys tell it (reconstruction).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.published.chain import (
    Chain,
    Stages,
    answer_of,
    divisors,
    least_in_order,
    with_microbatches,
)
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["held_by", "plan", "worker"]


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    best: tuple[float, Stages, int] | None = None
    for size in divisors(problem.ranks):
        workers = problem.ranks // size
        if size > len(problem.layers) or count % workers:
            continue
        for under_way in range(1, min(2 * size - 1, count // workers) + 1):
            found = worker(chain, size, under_way)
            if found is None:
                break  # more micro-batches need more memory
            slowest, stages = found
            way = chain.seconds(0, len(problem.layers)) + sum(2 * chain.message(last + 1) for _, last in stages[:-1])
            step = count // workers * max(slowest, way / under_way) + _exchange(chain, stages, workers)
            best = min(best, (step, stages, workers)) if best is not None else (step, stages, workers)
    if best is None:
        return None
    seconds, stages, workers = best
    return answer_of(
        "hetpipe",
        problem,
        stages,
        replicas=(workers,) * len(stages),
        tensor=(1,) * len(stages),
        microbatches=count // workers,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=seconds,
    )


def worker(chain: Chain, size: int, under_way: int) -> tuple[float, Stages] | None:
    """The least slowest stage, with its messages, of a worker with so many devices and micro-batches under way."""
    layers, limit = len(chain.problem.layers), chain.problem.memory[chain.problem.ranks]
    sent = np.array([0.0, *(2 * chain.message(at) for at in range(1, layers)), 0.0])
    seconds = chain.ranges("forward") + chain.ranges("backward") + sent[:, None] + sent[None, :]
    states = chain.ranges("weight") + chain.ranges("gradient") + chain.ranges("state") + chain.working()
    saved = chain.ranges("saved")
    costs = []
    for stage in range(size):
        peak = states + held_by(stage, size, under_way) * saved
        costs.append(np.where(peak <= limit, seconds, np.inf))
    return least_in_order(costs)


def held_by(stage: int, size: int, under_way: int) -> int:
    """The micro-batches between their forward and their backward on a stage, if all stages take as long."""
    return min(under_way, 2 * (size - stage) - 1)


def _exchange(chain: Chain, stages: Stages, workers: int) -> float:
    """Seconds in which a worker pushes its changes and pulls weights, all stages at the same time."""
    if workers == 1:
        return 0.0
    link = chain.problem.link
    return max(2 * link.seconds(chain.total("weight", first, last + 1)) for first, last in stages)
