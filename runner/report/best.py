"""Finds the best run of a sweep, and the figure by which it is compared with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from runner.report.read import Run

__all__ = ["FIGURES", "best_of", "figure_of"]

FIGURES: Mapping[str, Callable[[Run], float | None]] = {
    "val_loss": lambda run: run.val_loss,
    "loss": lambda run: run.loss,
}
"""The figures by which a run can be the best, the more telling first: the lower, the better."""


def best_of(runs: Sequence[Run], figure: str) -> Run | None:
    """The complete run whose figure is the lowest, the first of several; None if no complete run has the figure."""
    values = [(value, at) for at, run in enumerate(runs) if (value := _finite(run, figure)) is not None]
    return runs[min(values)[1]] if values else None


def figure_of(runs: Sequence[Run]) -> str | None:
    """The figure by which complete runs are compared unless another is named; None if there is nothing to compare."""
    known = (name for name in FIGURES if sum(_finite(run, name) is not None for run in runs) > 1)
    return next(known, None)


def _finite(run: Run, figure: str) -> float | None:
    value = FIGURES[figure](run) if run.record.status == "ok" else None
    return value if value is not None and math.isfinite(value) else None
