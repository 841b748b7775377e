"""``planner=pipedream``: the least slowest stage, by dynamic programming over layers and devices.

A stage of m replicas takes max(compute, 2 (m - 1) weights / bandwidth) / m for a micro-batch, and a message counts as a
stage of its own. Steady state alone: filling, memory and recomputation are not modelled. The links have one level here.

Source: Narayanan et al. 2019, PipeDream (section 3.1; reconstruction of the paper's form).
"""

from __future__ import annotations

from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, least_slowest
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["plan", "slowest"]

_FOR_EACH = 4  # micro-batches for each device: the paper's are mini-batches, and a step of the runner has several


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    counts = [each for each in divisors(problem.batch) if each >= min(_FOR_EACH * problem.ranks, problem.batch)]
    chain = Chain(problem, problem.divisions[0], problem.batch / counts[0])
    seconds, stages, replicas = slowest(chain, problem.ranks)
    microbatches = max(1, counts[0] // max(replicas))
    kept = (problem.divisions[0].kept[0].name,) * len(stages)
    parts = (1,) * len(stages)
    whole = counts[0] * seconds
    return answer_of(
        "pipedream",
        problem,
        stages,
        replicas=replicas,
        tensor=parts,
        microbatches=microbatches,
        kept=kept,
        seconds=whole,
    )


def stage_seconds(chain: Chain, first: int, end: int, replicas: int) -> float:
    """Seconds of a replicated stage for a micro-batch, by the paper."""
    size, speed = chain.total("weight", first, end), chain.problem.link.bytes_per_second
    sums = 2 * (replicas - 1) * size / speed if speed else 0.0
    return max(chain.seconds(first, end), sums) / replicas


def slowest(chain: Chain, devices: int) -> tuple[float, Stages, tuple[int, ...]]:
    """The least seconds of the slowest stage on exactly so many devices, with the stages and their replicas."""
    return least_slowest(chain, devices, lambda first, end, own: stage_seconds(chain, first, end, own))
