"""``planner=pipedream``: the least slowest stage, by dynamic programming over layers and devices.

A stage of m replicas takes max(compute, 2 (m - 1) weights / bandwidth) / m for a micro-batch, and a message counts as a
stage of its own. Steady state alone: filling, memory and recomputation are not modelled. The links have one level here.

Source: Narayanan et al. 2019, PipeDream (section 3.1; reconstruction of the paper's form).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, given_microbatches, least_slowest
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "plan", "slowest"]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    count = given_microbatches(problem)
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    seconds, stages, replicas = slowest(chain, problem.ranks)
    return answer_of(
        "pipedream",
        problem,
        stages,
        replicas=replicas,
        tensor=(1,) * len(stages),
        microbatches=max(1, count // max(replicas)),
        count=count,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=count * seconds,
    )


def slowest(chain: Chain, devices: int) -> tuple[float, Stages, tuple[int, ...]]:
    """The least seconds of the slowest stage on exactly so many devices, with the stages and their replicas."""
    counts, speed = np.arange(devices + 1), chain.problem.link.bytes_per_second
    many = np.maximum(counts, 1)

    def cost(first: int, end: int) -> Numbers:
        sums = 2 * (counts - 1) * chain.total("weight", first, end) / speed if speed else np.zeros(len(counts))
        found: Numbers = np.maximum(chain.seconds(first, end), sums) / many
        return np.maximum(found, 2 * chain.message(first)) if first else found

    return least_slowest(len(chain.problem.layers), devices, cost)


PLANNER = PlannerKind(
    name="pipedream",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, replicas of each stage",
    by="dynamic program, the least slowest stage",
    lacks="filling the pipeline, memory",
    position=10,
)
