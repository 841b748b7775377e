"""Finds the best run of a sweep, and the figure by which it is compared with the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runner.report.read import Run

__all__ = ["LOSSES", "MODES", "best_of", "figure_of", "figures_of", "name_and_mode", "value_of"]

LOSSES = ("val_loss", "loss")
"""The figures that every run may have, the more telling first: the lower, the better."""

MODES = ("min", "max")
"""Which value of a figure is the best: the lowest or the highest. Of a metric, only its author knows."""


def name_and_mode(figure: str) -> tuple[str, str | None]:
    """The two parts of ``val_accuracy:max``; the mode is None where the figure has no colon."""
    name, colon, mode = figure.partition(":")
    return name, mode if colon else None


def figures_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The names of all figures by which these runs can be compared: the losses, and the metrics of validations."""
    return tuple(dict.fromkeys([*LOSSES, *(name for run in runs for name in run.metrics)]))


def value_of(run: Run, name: str) -> float | None:
    """A run's figure, at its last step or validation; None if it is not known."""
    if name in LOSSES:
        return run.val_loss if name == "val_loss" else run.loss
    return run.metrics.get(name)


def best_of(runs: Sequence[Run], figure: str) -> Run | None:
    """The best complete run, the first of several; None if no complete run has the figure.

    Args:
        runs: the jobs of a sweep.
        figure: a name of :func:`figures_of`, with ``:max`` where the highest value is the best.
    """
    name, mode = name_and_mode(figure)
    sign = -1 if mode == "max" else 1
    values = [(sign * value, at) for at, run in enumerate(runs) if (value := _finite(run, name)) is not None]
    return runs[min(values)[1]] if values else None


def figure_of(runs: Sequence[Run]) -> str | None:
    """The loss by which complete runs are compared unless another is named; None if there is nothing to compare."""
    known = (name for name in LOSSES if sum(_finite(run, name) is not None for run in runs) > 1)
    return next(known, None)


def _finite(run: Run, name: str) -> float | None:
    value = value_of(run, name) if run.record.status == "ok" else None
    return value if value is not None and math.isfinite(value) else None
