"""What ZeRO and its offload cannot be combined with: one row per rule, with whose rule it is.

The table is data: it is checked before a launch, printed by ``runner plan --why`` and drawn in docs/zero.md. Sources
are files of DeepSpeed 0.19.8 where the rule is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.rules.zero_offload import OFFLOAD_ROWS
from runner.config.rules.zero_row import Row
from runner.config.rules.zero_sharing import SHARING_ROWS
from runner.config.schema import RunConfig
from runner.errors import Problem

__all__ = ["ROWS", "compatibility_lines", "zero_rules"]

ROWS: tuple[Row, ...] = (*SHARING_ROWS, *OFFLOAD_ROWS)


def zero_rules(config: RunConfig) -> Iterator[Problem]:
    """Every row that the request breaks; of several with one key the first."""
    told: set[str] = set()
    for row in ROWS:
        if row.path not in told and row.breaks(config):
            told.add(row.path)
            yield row.problem(config)


def compatibility_lines(config: RunConfig) -> list[str]:
    """The table in words, each row with whether the request keeps it."""
    broken = {id(row) for row in ROWS if row.breaks(config)}
    marks = ("BROKEN" if id(row) in broken else "kept  " for row in ROWS)
    return [f"{mark}  {row.path}: {row.rule}. {row.why} ({row.source})" for mark, row in zip(marks, ROWS, strict=True)]
