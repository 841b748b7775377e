"""The loss against a number that runs were swept over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.report.read import Report, Run

__all__ = ["Curve", "curves", "swept_keys"]

Curve = tuple[str, list[tuple[float, float]]]
"""What all runs of a curve have in common, and their points: the value of the key, and the loss."""

_FEWEST = 3  # values of a key that make a curve
_MOST_CURVES = 10
_MOST_KEYS = 3


def swept_keys(report: Report) -> list[str]:
    """The fields with several numbers over the runs of a sweep, against which their losses are worth a picture."""
    found = [path for path, values in report.differing.items() if len(_numbers(values)) >= _FEWEST]
    return found[:_MOST_KEYS] if report.is_sweep else []


def curves(report: Report, key: str) -> list[Curve]:
    """The last losses of the runs by a key, one curve for each combination of the other fields that differ.

    Validation's loss where there is any, else that of the last step; runs without a finite one are left out. Empty if
    there are too many combinations to tell apart, or no curve has two points.
    """
    others = {path: values for path, values in report.differing.items() if path != key}
    validated = any(run.val_loss is not None for run in report.runs)
    found: dict[str, list[tuple[float, float]]] = {}
    for at, run in enumerate(report.runs):
        value, loss = report.differing[key][at], _loss(run, validated=validated)
        if _is_number(value) and loss is not None and math.isfinite(loss):
            found.setdefault(_named(others, at), []).append((float(value), loss))
    drawn = [(name, sorted(points)) for name, points in found.items()]
    return drawn if len(drawn) <= _MOST_CURVES and any(len(points) > 1 for _, points in drawn) else []


def _loss(run: Run, *, validated: bool) -> float | None:
    return run.val_loss if validated else run.loss


def _named(others: Mapping[str, Sequence[Any]], at: int) -> str:
    return " ".join(f"{path.rpartition('.')[2]}={values[at]}" for path, values in others.items())


def _numbers(values: Sequence[Any]) -> set[float]:
    return {float(value) for value in values if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
