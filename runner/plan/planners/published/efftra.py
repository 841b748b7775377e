"""``planner=efftra``: each layer is in a pipelined stage or in a data-parallel group, by dynamic programming.

The dynamic program over layers and devices finds the least slowest stage, where a stage on several devices is a
data-parallel group that takes compute / m and its share of the sum of gradients. Its plan, one group of all devices,
and as many stages as devices are then compared by the flushed step: the slowest stage for each micro-batch after the
first, all stages once, messages, and the longest sum of gradients. So it is never worse than either extreme by its own
model. Memory and recomputation are not modelled.

Source: Zeng et al., EffTra, as the surveys tell it (reconstruction: the recurrence is ours).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import (
    Chain,
    Stages,
    answer_of,
    given_microbatches,
    least_in_order,
    least_slowest,
)
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "grouped", "plan", "step_seconds"]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    count = given_microbatches(problem)
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    plans = [*_extremes(chain), grouped(chain, problem.ranks, count)]
    stages, replicas = min(plans, key=lambda each: step_seconds(chain, each[0], each[1], count))
    return answer_of(
        "efftra",
        problem,
        stages,
        replicas=replicas,
        tensor=(1,) * len(stages),
        microbatches=max(1, count // max(replicas)),
        count=count,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=step_seconds(chain, stages, replicas, count),
    )


def _extremes(chain: Chain) -> list[tuple[Stages, tuple[int, ...]]]:
    """One group of all devices, and as many stages as devices and layers allow."""
    layers, devices = len(chain.problem.layers), chain.problem.ranks
    stages = min(layers, devices)
    cut = least_in_order([chain.ranges("forward") + chain.ranges("backward")] * stages)
    assert cut is not None  # there are as many layers as stages
    return [(((0, layers - 1),), (devices,)), (cut[1], (1,) * stages)]


def grouped(chain: Chain, devices: int, count: int) -> tuple[Stages, tuple[int, ...]]:
    """The stages and the devices of each with the least slowest stage, if a step has ``count`` micro-batches."""
    many = np.maximum(np.arange(devices + 1), 1)

    def cost(first: int, end: int) -> Numbers:
        sums = np.array([chain.sum_seconds(first, end, int(own)) for own in many])
        found: Numbers = chain.seconds(first, end) / many + sums / count
        return np.maximum(found, 2 * chain.message(first)) if first else found

    return least_slowest(len(chain.problem.layers), devices, cost)[1:]


def step_seconds(chain: Chain, stages: Stages, replicas: tuple[int, ...], count: int) -> float:
    """Seconds of a flushed step of ``count`` micro-batches over all replicas."""
    times = [chain.seconds(first, last + 1) / own for (first, last), own in zip(stages, replicas, strict=True)]
    messages = [2 * chain.message(last + 1) for _, last in stages[:-1]]
    sums = [chain.sum_seconds(first, last + 1, own) for (first, last), own in zip(stages, replicas, strict=True)]
    return (count - 1) * max([*times, *messages]) + sum(times) + sum(messages) + max(sums)


PLANNER = PlannerKind(
    name="efftra",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, replicas of each stage",
    by="dynamic program, compared with both extremes",
    lacks="memory",
    position=130,
)
