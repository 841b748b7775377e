"""Each rank's order in short: torch's schedule CSV, the form that ``schedule=from_file`` reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from runner.schedule.values import MOVES, Action, Op, Schedule

__all__ = ["cells", "label", "to_csv"]


def label(schedule: Schedule, action: Action) -> str:
    """``2F0``; of a part of a micro-batch that was asked for: ``2B0.1``."""
    if schedule.parts == 1 or action.microbatch is None:
        return str(action)
    number, part = divmod(action.microbatch, schedule.parts)
    return f"{action._replace(microbatch=number)}.{part}"


def cells(schedule: Schedule, row: Sequence[Action]) -> list[str]:
    """A rank's compute; forwards that are one in one cell: ``0F0+1``, or ``0F0`` where these are all parts of it."""
    written = []
    for action in row:
        if action.op in MOVES:
            continue
        if action.op is not Op.F or schedule.joined == 1:
            written.append(label(schedule, action))
            continue
        assert action.microbatch is not None  # compute always has one
        first, *others = schedule.joined_with(action.microbatch)[:: schedule.parts]
        if action.microbatch == schedule.joined_with(action.microbatch)[0]:
            numbers = "+".join(str(number // schedule.parts) for number in (first, *others))
            written.append(f"{action.stage}F{numbers}")
    return written


def to_csv(schedule: Schedule) -> str:
    """One row per rank, its compute in order, cells like ``0F0``; no blank cells, because order alone counts."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells(schedule, row) for row in schedule.actions)
    return text.getvalue()
