"""What rules ask of a schedule, as one small value."""

from __future__ import annotations

from dataclasses import dataclass

from runner.schedule.fills import Filling
from runner.schedule.values import Op, Schedule

__all__ = ["ScheduleTraits", "traits_of"]


@dataclass(frozen=True, slots=True)
class ScheduleTraits:
    """The traits of a schedule that decide what it goes with.

    Args:
        name: of the generator.
        ranks: pipeline ranks.
        stages: stages of one pipeline.
        has_copies: a stage lives on several ranks of one replica: twins, or backwards on other ranks.
        one_stage_per_rank: every rank holds exactly one stage.
        splits_backward: some backward is written as I and W.
        recomputes: some forward is run again before its backward, by an action of its own.
        moves_activations: what a stage keeps for a backward is on another rank for a while.
        filling: the work that fills its bubbles; None: none does.
        is_asynchronous: some weights that a forward reads lack updates of optimizer steps before it.
        leaves_its_order: a rank may take a forward before its turn, see ``Schedule.ahead``.
    """

    name: str
    ranks: int
    stages: int
    has_copies: bool
    one_stage_per_rank: bool
    splits_backward: bool
    recomputes: bool
    moves_activations: bool
    filling: Filling | None
    is_asynchronous: bool
    leaves_its_order: bool


def traits_of(schedule: Schedule) -> ScheduleTraits:
    """The traits of ``schedule``, from one look at its actions."""
    ops = {action.op for actions in schedule.actions for action in actions}
    return ScheduleTraits(
        name=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        has_copies=len(schedule.rows) > 1,
        one_stage_per_rank=all(len(schedule.stages_of(rank)) == 1 for rank in range(schedule.ranks)),
        splits_backward=not ops.isdisjoint({Op.I, Op.W}),
        recomputes=Op.R in ops,
        moves_activations=bool(schedule.moves),
        filling=schedule.filling,
        is_asynchronous=schedule.is_asynchronous,
        leaves_its_order=schedule.ahead > 0,
    )
