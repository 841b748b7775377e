"""The rules of ZeRO and its offload: one row per rule, with its source.

If a rule is DeepSpeed's, its source is a file of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from runner.config.deepspeed_file import file_problems
from runner.config.rules.table import Computed, Row, Table
from runner.config.rules.zero_offload import OFFLOAD_ROWS
from runner.config.rules.zero_sharing import SHARING_ROWS
from runner.config.schema import RunConfig

__all__ = ["DEEPSPEED_FILE", "ROWS", "ZERO"]

ROWS: tuple[Row[RunConfig], ...] = (*SHARING_ROWS, *OFFLOAD_ROWS)

ZERO: Table[RunConfig] = Table("ZeRO and offload", ROWS, first_of_each_key=True, cites=True)

DEEPSPEED_FILE: Table[RunConfig] = Table(
    "A DeepSpeed configuration of your own",
    (
        Computed(
            "zero.config",
            file_problems,
            "must be a JSON file whose keys say what the request says, or only tune",
            "What the runner decides is decided once, and no key is dropped in silence",
            "runner/config/deepspeed_file.py",
        ),
    ),
)
