"""PipeFB: forwards and backwards of a stage are on different ranks, so both go the same way round the ranks.

Stage s runs forward on rank s and backward on rank D - 1 - s; the last stage runs both on rank 0, with one copy. A
forward keeps nothing: it sends its output to the next stage's forward, and also to the rank of that stage's backward,
which computes the stage again from it. So each rank does the forward of one stage and the backward of another.

Source: only the name of the public schedule; no description was available, so the order is our reconstruction.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.layout import backward, forward, of_one_pipeline
from runner.schedule.generators.one_directional.varuna import just_in_time
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.simulation.clock import Costs
from runner.schedule.simulation.list_scheduling import list_schedule
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "pipefb"]


def pipefb(ranks: int, microbatches: int) -> Schedule:
    """Generate PipeFB by list scheduling with B = 2 F, with the rule :func:`just_in_time`.

    Args:
        ranks: D, at least 2.
        microbatches: T.
    """
    forwards = (*range(ranks - 1), 0)
    backwards = tuple(ranks - 1 - stage for stage in range(ranks))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for microbatch in range(microbatches):
        for stage in range(ranks):
            rows[forwards[stage]].append(forward(stage, microbatch))
            rows[backwards[stage]].append(backward(stage, microbatch))
            if stage < ranks - 1:
                rows[backwards[stage]].append(Action(Op.R, stage, microbatch))
    draft = replace(of_one_pipeline("pipefb", forwards, rows, microbatches), backward_placement=backwards)
    return list_schedule(draft, Costs().per_stage(ranks, 1), just_in_time)


SPEC = ScheduleSpec(
    name="pipefb",
    position=170,
    description="forwards and backwards of a stage on different ranks: the weights twice, no activation waits",
    summary="backwards on other ranks than their forwards, recomputed; twice the weights",
    source="our reconstruction: backwards flow the way of the forwards, recomputed from inputs that are sent twice",
    formulas=None,
    generate=lambda request: pipefb(request.ranks, request.microbatches),
    searched=False,
)
