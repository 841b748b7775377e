"""``planner=varuna``: every depth with even blocks and the largest micro-batch that fits, by playing its order.

What is left of the devices by the depth stays idle. Its own order runs forwards again.

Source: Athlur et al. 2022, Varuna (section 5), and its public search over depths (reconstruction).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.orders import Orders
from runner.plan.planners.published.chain import Chain, answer_of, divisors, even_cut
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Order, PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "plan"]

_ORDER = Order("varuna", 1)


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    orders, found = Orders(), list[PlanningAnswer]()
    for pipeline in range(1, min(len(problem.layers), problem.ranks) + 1):
        data = max(each for each in divisors(problem.batch) if each <= problem.ranks // pipeline)
        stages = even_cut(len(problem.layers), pipeline)
        microbatches = _fewest(problem, stages, pipeline, data)
        order = orders.of(_ORDER if pipeline > 1 else None, pipeline, microbatches or 1)
        if microbatches is None or order is None:
            continue
        setting = Setting(problem.divisions[0], problem.batch / (data * microbatches), microbatches, data, None)
        cuts = np.array([[first] for first, _ in stages] + [[len(problem.layers)]])
        played = Candidates(cuts, np.zeros((pipeline, 1), dtype=np.int64))
        seconds = float(StageTable(problem, setting).step_seconds(played, order)[0])
        kept = (problem.divisions[0].kept[0].name,) * pipeline
        answer = answer_of(
            "varuna",
            problem,
            stages,
            replicas=(data,) * pipeline,
            tensor=(1,) * pipeline,
            microbatches=microbatches,
            kept=kept,
            seconds=seconds,
        )
        found.append(answer)
    return min(found, key=lambda each: each.seconds, default=None)


def _fewest(problem: PlanningProblem, stages: tuple[tuple[int, int], ...], pipeline: int, data: int) -> int | None:
    """The fewest micro-batches with which every stage fits; None if none does."""
    for microbatches in divisors(problem.batch // data):
        chain = Chain(problem, problem.divisions[0], problem.batch / (data * microbatches))
        # Its order keeps the inputs of those in flight and what one micro-batch saves.
        inputs = min(pipeline, microbatches) * chain.samples * max(problem.divisions[0].boundary)
        if all(chain.peak(first, last + 1, 1) + inputs <= problem.memory[problem.ranks] for first, last in stages):
            return microbatches
    return None


PLANNER = PlannerKind(
    name="varuna",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="depth, replicas, micro-batch",
    by="plays of its order, even blocks",
    lacks="uneven blocks",
    position=110,
)
