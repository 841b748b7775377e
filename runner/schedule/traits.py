"""The traits of a schedule that rules ask for, as one small value."""

from __future__ import annotations

from dataclasses import dataclass

from runner.schedule.fills import Filling
from runner.schedule.gaps import forwards_read_newest
from runner.schedule.generators.replicated import replicas_of
from runner.schedule.values import Op, Schedule

__all__ = ["ScheduleTraits", "traits_of"]


@dataclass(frozen=True, slots=True)
class ScheduleTraits:
    """The traits of a schedule that decide with which options it can be combined.

    Args:
        name: name of the generator.
        ranks: number of pipeline ranks.
        stages: number of stages of one pipeline.
        has_copies: whether a stage is on several ranks of one replica: as twins, or because of backwards elsewhere.
        own_weights: whether each pipeline trains weights of its own.
        exchanges_waves: whether replicas exchange changes of weights instead of gradients.
        one_stage_per_rank: whether every rank holds exactly one stage.
        splits_backward: whether some backward is split into I and W.
        recomputes: whether an action of the schedule runs some forward again before its backward.
        moves_activations: whether another rank keeps some of a stage's saved tensors for a while.
        filling: the work that fills its bubbles; None if there is none.
        is_asynchronous: whether windows overlap, so that some forwards read weights without all earlier updates.
        reads_newest: whether a backward may read newer weights than its forward.
        forwards_read_newest: whether every forward reads the newest weights that its stage has when it runs.
        leaves_its_order: whether a rank may take a forward before its turn; see ``Schedule.ahead``.
        takes_turns: whether several ranks hold one stage alone and take its micro-batches in turns.
    """

    name: str
    ranks: int
    stages: int
    has_copies: bool
    own_weights: bool
    exchanges_waves: bool
    one_stage_per_rank: bool
    splits_backward: bool
    recomputes: bool
    moves_activations: bool
    filling: Filling | None
    is_asynchronous: bool
    reads_newest: bool
    forwards_read_newest: bool
    leaves_its_order: bool
    takes_turns: bool

    @property
    def one_copy(self) -> str:
        """An override with which every stage is on one rank and runs each forward once."""
        return "schedule.replicas=null" if self.takes_turns else "schedule=1f1b"


def traits_of(schedule: Schedule) -> ScheduleTraits:
    """The traits of ``schedule``, from one pass over its actions."""
    ops = {action.op for actions in schedule.actions for action in actions}
    return ScheduleTraits(
        name=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        has_copies=any(len(schedule.copies_of(stage)) > 1 for stage in range(schedule.stages)),
        own_weights=schedule.own_weights,
        exchanges_waves=schedule.wave > 0,
        one_stage_per_rank=all(len(schedule.stages_of(rank)) == 1 for rank in range(schedule.ranks)),
        splits_backward=not ops.isdisjoint({Op.I, Op.W}),
        recomputes=Op.R in ops,
        moves_activations=bool(schedule.moves),
        filling=schedule.filling,
        is_asynchronous=schedule.is_asynchronous,
        reads_newest=schedule.reads_newest,
        forwards_read_newest=not schedule.is_asynchronous or forwards_read_newest(schedule),
        leaves_its_order=schedule.ahead > 0,
        takes_turns=replicas_of(schedule) is not None,
    )
