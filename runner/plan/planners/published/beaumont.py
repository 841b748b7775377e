"""``planner=beaumont``: the shortest period of a pipeline whose stages fit what a period makes them keep.

1F1B*: from the last stage back, stages and the messages between them join a group while their summed seconds are at
most the period; a stage of the g-th group keeps g micro-batches. For a period, a dynamic program over cuts keeps the
lowest (group, seconds in it) of the layers from each on, because what is lower stays lower; the period is bisected.
The paper's stages that are not consecutive are not searched; devices that are no stage are replicas, whose sums come
at the end of a step. Filling the pipeline and recomputation are not modelled.

Source: Beaumont, Eyraud-Dubois and Shilova 2021, Pipelined model parallelism: complexity results and memory
considerations.
"""

from __future__ import annotations

from runner.plan.planners.kinds import CUTS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, with_microbatches
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "cut_for", "plan", "shortest_period"]

_HALVINGS = 30
_NEAR = 1e-7  # part of the period within which the bisection ends

Label = tuple[int, float]
"""The group of the first of some layers, and the seconds in it."""


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    best = None
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    for pipeline in divisors(problem.ranks):
        data = problem.ranks // pipeline
        if pipeline > len(problem.layers) or count % data:
            continue
        found = shortest_period(chain, pipeline)
        if found is not None:
            period, stages = found
            sums = max(chain.sum_seconds(first, last + 1, data) for first, last in stages)
            made = count // data * period + sums, stages, data
            best = made if best is None else min(best, made)
    if best is None:
        return None
    seconds, stages, data = best
    return answer_of(
        "beaumont",
        problem,
        stages,
        replicas=(data,) * len(stages),
        tensor=(1,) * len(stages),
        microbatches=count // data,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=seconds,
    )


def shortest_period(chain: Chain, stages: int) -> tuple[float, Stages] | None:
    """The shortest period of so many stages and its cut; None if nothing fits even one micro-batch at a time."""
    layers = len(chain.problem.layers)
    low = chain.seconds(0, layers) / stages
    high = chain.seconds(0, layers) + 2 * sum(chain.message(end) for end in range(1, layers))
    found = cut_for(chain, stages, high)
    if found is None:
        return None
    for _ in range(_HALVINGS):
        if high - low <= _NEAR * high:
            break
        middle = (low + high) / 2
        made = cut_for(chain, stages, middle)
        if made is None:
            low = middle
        else:
            high, found = middle, made
    return high, found


def cut_for(chain: Chain, stages: int, period: float) -> Stages | None:
    """A cut that has this period and fits; None if there is none."""
    layers, limit = len(chain.problem.layers), chain.problem.memory[chain.problem.ranks]

    def joined(label: Label, seconds: float) -> Label:
        group, inside = label
        return (group, inside + seconds) if inside + seconds <= period else (group + 1, seconds)

    labels: dict[int, Label] = {layers: (1, 0.0)}
    came = list[dict[int, int]]()
    for stage in reversed(range(stages)):
        reached: dict[int, Label] = {}
        ends: dict[int, int] = {}
        for end, label in labels.items():
            message = 2 * chain.message(end) if end < layers else 0.0
            behind = joined(label, message)
            if message > period:
                continue
            for first in range(end - 1, stage - 1, -1):
                seconds = chain.seconds(first, end)
                made = joined(behind, seconds)
                if seconds > period or chain.peak(first, end, made[0]) > limit:
                    break
                if first not in reached or made < reached[first]:
                    reached[first], ends[first] = made, end
        labels = reached
        came.append(ends)
    if 0 not in labels:
        return None
    found, first = list[tuple[int, int]](), 0
    for ends in reversed(came):
        found.append((first, ends[first] - 1))
        first = ends[first]
    return tuple(found)


PLANNER = PlannerKind(
    name="beaumont",
    plan=plan,
    axes=(CUTS,),
    chooses="cut, depth",
    by="shortest period that fits, 1F1B*",
    lacks="filling the pipeline, recomputation",
    position=160,
)
