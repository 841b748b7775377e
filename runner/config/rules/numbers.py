"""Rules of one number: problems where it is out of its range."""

from __future__ import annotations

import math
from collections.abc import Iterator

from runner.errors import Problem

__all__ = ["at_least", "not_negative", "positive"]


def at_least(path: str, value: int | None, least: int) -> Iterator[Problem]:
    if value is not None and value < least:
        yield Problem(path, value, f"must be at least {least}", fix=f"{path}={least}")


def positive(path: str, value: float | None, fix: str) -> Iterator[Problem]:
    if value is not None and not (value > 0 and math.isfinite(value)):
        yield Problem(path, value, "must be a finite number above 0", fix=f"{path}={fix}")


def not_negative(path: str, value: float) -> Iterator[Problem]:
    if not (value >= 0 and math.isfinite(value)):
        yield Problem(path, value, "must be a finite number, 0 or above", fix=f"{path}=0")
