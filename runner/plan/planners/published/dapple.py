"""``planner=dapple``: the shortest flushed step by warm-up, steady phase and end, over side-by-side pipelines.

For every number of devices of a pipeline, as many pipelines as there is room for; stages are cut such that the slowest
takes least, each with replicas of its own, and beside that every cut in two stages is looked at. The step is
block (M - 1) + the stages, messages, and what the sums of gradients take beyond the drain. Memory is not checked. The
links have one level here: all placements are one. The planner shares out the samples of a micro-batch among the
replicas of a stage; where their numbers differ, the engine's take micro-batches in turns.

Source: Fan et al. 2021, DAPPLE, and its public planner's form (reconstruction).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, least_slowest
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "block_of", "length", "plan"]


def plan(problem: PlanningProblem) -> PlanningAnswer:
    """The answer to a problem."""
    best: tuple[float, Stages, tuple[int, ...], int] | None = None
    for devices in divisors(problem.ranks):
        aside = problem.ranks // devices
        for microbatches in divisors(problem.batch // aside) if problem.batch % aside == 0 else []:
            chain = Chain(problem, problem.divisions[0], problem.batch / (aside * microbatches))
            for stages, replicas in [block_of(chain, devices)[1:], *_in_two(len(problem.layers), devices)]:
                seconds = length(chain, stages, replicas, microbatches, aside)
                if best is None or seconds < best[0]:
                    best = seconds, stages, tuple(aside * each for each in replicas), microbatches
    assert best is not None  # one device is always a pipeline
    seconds, stages, replicas, microbatches = best
    kept, parts = (problem.divisions[0].kept[0].name,) * len(stages), (1,) * len(stages)
    return answer_of(
        "dapple",
        problem,
        stages,
        replicas=replicas,
        tensor=parts,
        microbatches=microbatches,
        kept=kept,
        seconds=seconds,
    )


def _in_two(layers: int, devices: int) -> list[tuple[Stages, tuple[int, ...]]]:
    """Every cut in two stages, with every number of replicas of each."""
    cuts = [((0, first - 1), (first, layers - 1)) for first in range(1, layers)]
    return [(cut, (own, devices - own)) for cut in cuts for own in range(1, devices)]


def block_of(chain: Chain, devices: int) -> tuple[float, Stages, tuple[int, ...]]:
    """The least slowest stage or message on exactly so many devices, with the stages and their replicas."""
    many = np.maximum(np.arange(devices + 1), 1)

    def cost(first: int, end: int) -> Numbers:
        found: Numbers = chain.seconds(first, end) / many
        return np.maximum(found, 2 * chain.message(first)) if first else found

    return least_slowest(len(chain.problem.layers), devices, cost)


def length(chain: Chain, stages: Stages, replicas: tuple[int, ...], microbatches: int, aside: int) -> float:
    """Seconds of a step by the planner's formula."""
    times = [chain.seconds(first, last + 1) / own for (first, last), own in zip(stages, replicas, strict=True)]
    messages = [2 * chain.message(last + 1) for _, last in stages[:-1]]
    block = max([*times, *messages])
    late = 0.0
    for number, ((first, last), own) in enumerate(zip(stages, replicas, strict=True)):
        late = max(late, chain.sum_seconds(first, last + 1, own * aside) - number * block)
    return block * (microbatches - 1) + sum(times) + sum(messages) + late


PLANNER = PlannerKind(
    name="dapple",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, replicas of each stage, pipelines, micro-batches",
    by="dynamic program, then the flushed step's length",
    lacks="memory; bubbles of unlike stages: it is up to 14 % too long",
    position=20,
)
