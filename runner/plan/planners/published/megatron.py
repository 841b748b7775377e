"""``planner=megatron``: even blocks; layers are divided up to a node first, then a pipeline as short as it fits.

The rest are replicas; the micro-batch minimises (B / (D b) + P - 1) (forward(b) + backward(b)); everything is run again
where nothing fits otherwise.

Source: Narayanan et al. 2021, Megatron-LM (section 3, its takeaways; reconstruction).
"""

from __future__ import annotations

from runner.plan.planners.kinds import AGAIN, CUTS, PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, answer_of, divisors, even_cut
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "plan"]


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    names = [kept.name for kept in problem.divisions[0].kept]
    ways = [names.index(name) for name in ("none", "full") if name in names] or [0]
    for model in divisors(problem.ranks):  # ranks of one copy of the model: as few as fit
        division = max((each for each in problem.divisions if model % each.tensor == 0), key=lambda each: each.tensor)
        pipeline, data = model // division.tensor, problem.ranks // model
        if pipeline > len(problem.layers) or problem.batch % data:
            continue
        stages = even_cut(len(problem.layers), pipeline)
        for way in ways:
            found = []
            for microbatches in divisors(problem.batch // data):
                chain = Chain(problem, division, problem.batch / (data * microbatches), way)
                flight = min(pipeline, microbatches)
                size = max(chain.peak(first, last + 1, flight) for first, last in stages)
                if size <= problem.memory[problem.ranks]:
                    whole = chain.seconds(0, len(problem.layers)) / pipeline
                    found.append(((microbatches + pipeline - 1) * whole, microbatches, size))
            if found:
                seconds, microbatches, size = min(found)
                return answer_of(
                    "megatron",
                    problem,
                    stages,
                    replicas=(data,) * pipeline,
                    tensor=(division.tensor,) * pipeline,
                    microbatches=microbatches,
                    kept=(names[way],) * pipeline,
                    seconds=seconds,
                    peak_bytes=size,
                )
    return None


PLANNER = PlannerKind(
    name="megatron",
    plan=plan,
    axes=(
        PARTS,
        REPLICAS,
        CUTS,
        AGAIN,
    ),
    chooses="parts, depth, replicas, micro-batch, recomputation of all or none",
    by="takeaways, even blocks",
    lacks="messages, uneven blocks",
    position=140,
)
