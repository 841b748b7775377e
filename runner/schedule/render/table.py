"""torch's schedule CSV, the form that ``schedule=from_file`` reads."""

from __future__ import annotations

import csv
import io

from runner.schedule.values import Schedule

__all__ = ["to_csv"]


def to_csv(schedule: Schedule) -> str:
    """One row per rank, its compute in order, cells like ``0F0``; no blank cells, because order alone counts."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in row] for row in schedule.actions)
    return text.getvalue()
