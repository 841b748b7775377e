"""The tables of the page, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.recipes.schedules.tables import markdown_table

__all__ = ["closed_share", "markdown", "slope"]

_HEADER = ("batch", "rule", "steps", "rate", "train", "val", "val - train", "sharpness", "of the loss closed")
_FIXED = "fixed rate"


def markdown(made: Mapping[str, Any]) -> str:
    """Both tables as Markdown."""
    rows = made["rows"]
    lines = [_line(row, closed_share(row, rows)) for row in rows]
    parts = [markdown_table(_HEADER, lines), _closed_note(rows)]
    for when, noise in made["noise"].items():
        parts += [f"Variance of gradients {when}:", _noise_table(noise), _noise_note(noise)]
    return "\n\n".join(parts)


def closed_share(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How much of what the fixed rate loses at a batch size a rule wins back.

    What is lost is the difference of the validation losses of the fixed rate, between this batch size and the smallest
    one. 1 is all of it, and less than 0 makes it worse. None: nothing was lost, or a run failed.
    """
    fixed = {each["batch"]: each.get("val") for each in rows if each["rule"] == _FIXED}
    best, lost = fixed[min(fixed)], fixed.get(row["batch"])
    if row["rule"] == _FIXED or best is None or lost is None or lost <= best or "val" not in row:
        return None
    return float((lost - row["val"]) / (lost - best))


def slope(noise: Sequence[Mapping[str, float]]) -> float:
    """The slope of the straight line through the logarithms of variance and batch size, by least squares."""
    x = [math.log(each["batch"]) for each in noise]
    y = [math.log(each["variance"]) for each in noise]
    middle, level = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - middle) ** 2 for a in x)


def _line(row: Mapping[str, Any], closed: float | None) -> list[str]:
    told = [str(row["batch"]), row["rule"], str(row["steps"]), f"{row['rate']:.3g}"]
    if "val" not in row:
        return [*told, "failed", "-", "-", "-", "-"]
    share = "-" if closed is None else f"{closed:.0%}"
    return [*told, *(f"{row[key]:.3f}" for key in ("train", "val", "gap")), f"{row['sharpness']:.1f}", share]


def _closed_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rule that wins back the most at each batch size."""
    told = []
    for batch in sorted({row["batch"] for row in rows})[1:]:
        shares = {row["rule"]: closed_share(row, rows) for row in rows if row["batch"] == batch}
        known = {rule: share for rule, share in shares.items() if share is not None and share > 0}
        best = max(known, key=lambda rule: known[rule], default=None)
        told.append(f"at {batch} {best} {known[best]:.0%}" if best is not None else f"at {batch} no rule any")
    return f"Of what the fixed rate loses, the best rule wins back: {', '.join(told)}."


def _noise_table(noise: Sequence[Mapping[str, float]]) -> str:
    first = noise[0]
    lines = []
    for each in noise:
        expected = first["variance"] * first["batch"] / each["batch"]
        cells = [f"{each['batch']:.0f}", f"{each['batches']:.0f}", f"{each['variance']:.3e}"]
        lines.append([*cells, f"{each['variance'] / expected:.3f}"])
    return markdown_table(("batch", "batches", "variance", "of 1/B"), lines)


def _noise_note(noise: Sequence[Mapping[str, float]]) -> str:
    first = noise[0]
    told = f"Variance falls with the power {slope(noise):.2f} of the batch size"
    if first["gradient"] <= 0:
        return f"{told}; the mean gradient is too small to be told from noise."
    scale = first["batch"] * first["variance"] / first["gradient"]
    shown = f"{scale:.0f}" if scale >= 10 else f"{scale:.1f}"
    return f"{told}; it equals the square of the mean gradient at {shown} samples."
