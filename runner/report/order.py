"""Runs in the order of a column of their table."""

from __future__ import annotations

import math
from dataclasses import replace

from runner.errors import Problem, did_you_mean, raise_problems
from runner.report.best import MODES, name_and_mode
from runner.report.read import Report
from runner.report.speed import SPEEDS
from runner.report.tables import runs_table

__all__ = ["in_order"]

_LARGEST_FIRST = ("steps", "samples_per_second", "tokens_per_second")
_SHOWN_AS = {"step": "median_step_seconds", "peak_memory": "peak_memory_bytes"}
_SHOWN_AS |= {speed.header: speed.value_header for speed in SPEEDS}  # short headers of the shown table


def in_order(found: Report, column: str) -> Report:
    """The report with its runs ordered by a column of their table, runs without a value at the end.

    Texts are ordered by letters, numbers from the lowest on, except speeds and steps, which go from the highest on.

    Args:
        found: the runs.
        column: its name; ``:max`` or ``:min`` after it puts the highest or the lowest numbers first.

    Raises:
        RequestError: the table has no such column, or no such order.
    """
    table = runs_table(found)
    name, mode = name_and_mode(column)
    wanted = name.replace(" ", "_")
    wanted = _SHOWN_AS.get(wanted, wanted)
    if wanted not in table.value_header:
        near = did_you_mean(wanted, table.value_header)
        why, fix = f"The columns are {', '.join(table.value_header)}", f"--sort {near}" if near else ""
        raise_problems([Problem("--sort", column, "there is no such column", why, fix)])
    if mode not in (None, *MODES):
        raise_problems([Problem("--sort", column, "the order after the colon must be min or max")])
    at = table.value_header.index(wanted)
    sign = -1 if mode == "max" or (mode is None and wanted in _LARGEST_FIRST) else 1
    order = sorted(range(len(found.runs)), key=lambda index: _place(table.values[index][at], sign))
    differing = {path: tuple(values[index] for index in order) for path, values in found.differing.items()}
    return replace(found, runs=tuple(found.runs[index] for index in order), differing=differing)


def _place(value: object, sign: int) -> tuple[int, float, str]:
    """Numbers, then texts, then what is not known."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return 0, sign * value, ""
    if isinstance(value, str) and value:
        return (0, float(value), "") if value.isdigit() else (1, 0.0, value)
    return (1, 0.0, str(value)) if value is not None and not isinstance(value, int | float) else (2, 0.0, "")
