"""What the generators with stage = rank share."""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.values import Action, Op, Schedule

__all__ = ["backward", "forward", "straight"]


def straight(name: str, rows: Sequence[Sequence[Action]], microbatches: int) -> Schedule:
    """A schedule of one stage per rank, stage s on rank s, from each rank's list."""
    return Schedule(
        name=name,
        placement=(tuple(range(len(rows))),),
        pipeline_of_microbatch=(0,) * microbatches,
        actions=tuple(tuple(row) for row in rows),
    )


def forward(stage: int, microbatch: int) -> Action:
    """F of one stage and micro-batch."""
    return Action(Op.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """B of one stage and micro-batch."""
    return Action(Op.B, stage, microbatch)
