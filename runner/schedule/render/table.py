"""Writes each rank's order in short, as torch's CSV of a schedule, which ``schedule=from_file`` reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from runner.schedule.values import MOVES, Action, Op, Schedule

__all__ = ["cells", "label", "to_csv"]


def label(schedule: Schedule, action: Action) -> str:
    """An action as text: ``2F0``, or ``2B0.1`` if it is for part 1 of a requested micro-batch."""
    if schedule.parts == 1 or action.microbatch is None:
        return str(action)
    number, part = divmod(action.microbatch, schedule.parts)
    return f"{action._replace(microbatch=number)}.{part}"


def cells(schedule: Schedule, row: Sequence[Action]) -> list[str]:
    """A rank's compute as cells; forwards that are run together share one.

    Such a cell is ``0F0+1`` if they belong to several requested micro-batches, and ``0F0`` if they are parts of one.
    """
    written = []
    for action in row:
        if action.op in MOVES:
            continue
        if action.op is not Op.F or schedule.joined == 1:
            written.append(label(schedule, action))
            continue
        assert action.microbatch is not None  # every forward has one
        first, *others = schedule.joined_with(action.microbatch)[:: schedule.parts]
        if action.microbatch == schedule.joined_with(action.microbatch)[0]:
            numbers = "+".join(str(number // schedule.parts) for number in (first, *others))
            written.append(f"{action.stage}F{numbers}")
    return written


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV: one row for each rank, with cells like ``0F0`` in order; blank cells are not needed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells(schedule, row) for row in schedule.actions)
    return text.getvalue()
