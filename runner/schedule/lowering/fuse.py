"""I directly followed by W of the same stage and micro-batch is one full backward, where nobody waits for I alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.schedule.values import Action, Op, Schedule

__all__ = ["fuse_backwards"]


def fuse_backwards(schedule: Schedule) -> Schedule:
    """``schedule`` with B in place of each such pair.

    Nobody waits for the gradient of the first stage's input. Where the stage before is on the same rank, it waits for
    the W anyway. On all other stages the pair stays: the rank before gets its gradient before the W.
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
    assert action.microbatch is not None  # compute actions have one
    if action.stage == 0:
        return False
    here = schedule.rank_of(action.stage, action.microbatch)
    return schedule.rank_of(action.stage - 1, action.microbatch) != here
