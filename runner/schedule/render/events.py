"""The events of which a predicted or measured timeline consists."""

from __future__ import annotations

from typing import NamedTuple

from runner.schedule.render.table import label
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import COMPUTE, MOVES, Action, Op, Program, Schedule

__all__ = ["BESIDE", "Event", "events_of"]

BESIDE = frozenset({Op.SEND.value, Op.RECV.value, Op.REDUCE.value})
"""Ops that run at the same time as a rank's compute; they are drawn in a lane of their own."""


class Event(NamedTuple):
    """One thing that a rank did, with its times.

    Args:
        rank: pipeline rank.
        op: an :class:`~runner.schedule.values.Op`, a kind of fill, or any word for other work, e.g. ``data``.
        stage: the stage for which it was done; None if there is none.
        microbatch: the micro-batch for which it was done; None if there is none.
        start, end: the moments when it started and ended, in one unit for all events.
        name: its name in a trace; empty means stage, op and micro-batch.
        version: the version of the weights that it reads, where micro-batches of one step read several; else None.
    """

    rank: int
    op: str
    stage: int | None
    microbatch: int | None
    start: float
    end: float
    name: str = ""
    version: int | None = None

    @property
    def label(self) -> str:
        """The event's name, or a text like ``2F0`` if it has no name."""
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return self.name or f"{stage}{self.op}{microbatch}"


def events_of(view: Schedule | Program, costs: Costs | StageCosts) -> tuple[Event, ...]:
    """The simulated timeline, rank by rank."""
    times = simulate(view, costs)
    schedule = view.schedule if isinstance(view, Program) else view

    def asked(microbatch: int | None) -> int | None:
        return None if microbatch is None else microbatch // schedule.parts

    def version(action: Action) -> int | None:
        if not schedule.is_asynchronous or action.microbatch is None or action.op not in COMPUTE - {Op.FILL}:
            return None
        return schedule.version_read(action.stage, action.microbatch, action.op)

    return tuple(
        Event(
            rank,
            str(action.work),
            action.stage,
            asked(action.microbatch),
            start,
            end,
            label(schedule, action),
            version(action),
        )
        for rank, row in enumerate(view.actions)
        for action, start, end in zip(row, times.start[rank], times.end[rank], strict=True)
        if action.op not in MOVES
    )
