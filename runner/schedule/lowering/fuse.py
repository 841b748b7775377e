"""Fuses I and a directly following W of the same stage and micro-batch into B, if no other rank waits for the I."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.schedule.values import Action, Op, Schedule

__all__ = ["fuse_backwards"]


def fuse_backwards(schedule: Schedule) -> Schedule:
    """``schedule`` with B instead of each such pair.

    No rank waits for the gradient of the first stage's input. If the stage before is on the same rank, its backward
    comes after the W anyway. On all other stages the pair stays, so that the rank before gets its gradient before the W
    runs.
    """
    rows = tuple(tuple(_fused(schedule, row)) for row in schedule.actions)
    return schedule if rows == schedule.actions else replace(schedule, actions=rows)


def _fused(schedule: Schedule, row: Sequence[Action]) -> Iterator[Action]:
    at = 0
    while at < len(row):
        action = row[at]
        following = row[at + 1] if at + 1 < len(row) else None
        if action.op is Op.I and following == action._replace(op=Op.W) and not _is_awaited(schedule, action):
            yield action._replace(op=Op.B)
            at += 1
        else:
            yield action
        at += 1


def _is_awaited(schedule: Schedule, action: Action) -> bool:
    """Whether another rank waits for the gradient of the stage's input."""
    assert action.microbatch is not None  # every I has one
    if action.stage == 0:
        return False
    here = schedule.rank_of(action.stage, action.microbatch)
    return schedule.rank_of(action.stage - 1, action.microbatch) != here
