"""``planner=pipedream``: the least slowest stage, by dynamic programming over layers and devices.

``planner.form=paper``: a stage of m replicas takes max(compute, 2 (m - 1) weights / bandwidth) / m for a micro-batch,
and a message counts as a stage of its own. The links have one level.

``planner.form=repository``: a stage of m replicas takes (compute + 4 (m - 1) weights / (bandwidth m)) / m, a sum, and
messages take nothing. Each class of links is a level: what the devices of a group take together for a range of layers
is the compute of one machine of the next level, whose devices share out the sums. The public program shares them out
only where all machines of a level have one stage; here every stage's are.

Steady state alone: filling, memory and recomputation are not modelled.

Source: Narayanan et al. 2019, PipeDream (section 3.1; reconstruction of the paper's form), and its repository.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, given_microbatches, least_slowest
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.plan.values import Link
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "plan", "plan_by_levels", "slowest", "slowest_by_levels"]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem, by the paper's form."""
    count = given_microbatches(problem)
    return _answer(problem, count, *slowest(_chain(problem, count), problem.ranks))


def plan_by_levels(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem, by the repository's form."""
    count = given_microbatches(problem)
    levels = problem.links.levels(problem.ranks)
    return _answer(problem, count, *slowest_by_levels(_chain(problem, count), levels))


def _chain(problem: PlanningProblem, count: int) -> Chain:
    return Chain(problem, problem.divisions[0], problem.batch / count)


def _answer(
    problem: PlanningProblem, count: int, seconds: float, stages: Stages, replicas: tuple[int, ...]
) -> PlanningAnswer:
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


def slowest_by_levels(chain: Chain, levels: Sequence[tuple[int, Link]]) -> tuple[float, Stages, tuple[int, ...]]:
    """The least seconds of the slowest stage by the repository's form, with the stages and their replicas.

    Args:
        chain: the layers.
        levels: the devices of a group of each level, from inside to outside, all of which are used, and its link.
    """
    compute, weights, inside = chain.ranges("forward") + chain.ranges("backward"), chain.ranges("weight"), 1
    weights[np.isinf(weights)] = 0.0  # of empty ranges, whose seconds are infinite
    came = list[tuple[NDArray[np.int64], int]]()
    for devices, link in levels:
        machines = devices // inside
        counts = np.maximum(np.arange(machines + 1), 1)
        share = 4 * (counts - 1) / (link.bytes_per_second * counts * inside) if link.bytes_per_second else 0 * counts
        stages = (compute[:, :, None] + share * weights[:, :, None]) / counts
        best, from_where = _of_all_ranges(stages)
        came.append((from_where, machines))
        compute, inside = best[:, :, machines], devices
    layers = len(chain.problem.layers)
    found = list(_expanded(came, 0, layers, 1))
    return float(compute[0, layers]), tuple(stage for stage, _ in found), tuple(replicas for _, replicas in found)


def _of_all_ranges(stages: Numbers) -> tuple[Numbers, NDArray[np.int64]]:
    """For each range of layers and number of machines, the least slowest stage, and where its last one begins.

    Args:
        stages: seconds of a stage by its first layer, its end and its machines, of which that for 0 is not read.

    Returns:
        The least seconds, in the same shape, infinite where there are none; and for each of them the first layer of the
        last stage and the machines before it.
    """
    size, most = stages.shape[0], stages.shape[2]
    counts = np.arange(most)
    own = counts[None, :] - counts[:, None]  # [before, after]
    best, came = np.full(stages.shape, np.inf), np.zeros((*stages.shape, 2), dtype=np.int64)
    best[np.arange(size), np.arange(size), 0] = 0.0
    for end in range(1, size):
        for last in range(end):
            seconds = np.where(own > 0, stages[last, end][own], np.inf)
            worst = np.maximum(best[:, last, :, None], seconds)  # [first, before, after]
            least, before = worst.min(axis=1), worst.argmin(axis=1)
            better = least < best[:, end]
            best[:, end][better] = least[better]
            came[:, end][better] = np.stack([np.full_like(before, last), before], axis=-1)[better]
    return best, came


def _expanded(
    came: Sequence[tuple[NDArray[np.int64], int]], first: int, end: int, replicas: int
) -> list[tuple[tuple[int, int], int]]:
    """The stages of a range on a machine of the level above those given, with their replicas."""
    if not came:
        return [((first, end - 1), replicas)]
    *inner, (from_where, left) = came
    found = list[tuple[tuple[int, int], int]]()
    while end > first:
        last, before = from_where[first, end, left].tolist()
        found = _expanded(inner, last, end, replicas * (left - before)) + found
        end, left = last, before
    return found


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
    forms={"repository": plan_by_levels},
)
