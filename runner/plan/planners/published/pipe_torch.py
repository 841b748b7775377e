"""``planner=pipe_torch``: as PipeDream's, for machines that do not compute and communicate at the same time.

A stage of m replicas takes compute / m for a micro-batch, and to it are added its messages in both directions and its
share of the sum of gradients. The slowest stage is the least, by dynamic programming over layers and devices. Steady
state alone: filling, memory and recomputation are not modelled. All devices are alike here, so their order is none.

Source: Pipe-torch, 2019, as the surveys tell it: a dynamic program without overlap (reconstruction).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.published.chain import Chain, Stages, answer_of, given_microbatches, least_slowest
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["plan", "slowest_alone"]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    count = given_microbatches(problem)
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    seconds, stages, replicas = slowest_alone(chain, problem.ranks)
    return answer_of(
        "pipe_torch",
        problem,
        stages,
        replicas=replicas,
        tensor=(1,) * len(stages),
        microbatches=max(1, count // max(replicas)),
        count=count,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=count * seconds,
    )


def slowest_alone(chain: Chain, devices: int) -> tuple[float, Stages, tuple[int, ...]]:
    """The least seconds of the slowest stage with all that it sends, on exactly so many devices; with its stages."""
    layers, many = len(chain.problem.layers), np.maximum(np.arange(devices + 1), 1)

    def cost(first: int, end: int) -> Numbers:
        messages = sum(2 * chain.message(at) for at in (first, end) if 0 < at < layers)
        sums = np.array([chain.sum_seconds(first, end, int(own)) for own in many])
        found: Numbers = (chain.seconds(first, end) + sums) / many + messages
        return found

    return least_slowest(layers, devices, cost)
