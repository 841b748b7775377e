"""Bytes that all ranks send in a step, and the peak of a rank, by layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_MEGA = 1e6


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Draw two panels into an SVG file: bytes counted beside formulas, and peaks counted beside planned ones."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = [row["layout"].replace(", ", "\n") for row in rows]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tensor"}):  # the same bytes for the same figures
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        panels = figure.subplots(1, 2)
        pairs = (("sent", "formula", "MB sent in a step by all ranks"), ("peak", "planned", "peak of a rank, MB"))
        for axes, (counted, planned, title) in zip(panels, pairs, strict=True):
            places = range(len(rows))
            axes.bar(places, [row[counted] / _MEGA for row in rows], width=0.6, label="counted")
            axes.plot(places, [row[planned] / _MEGA for row in rows], "k_", markersize=18, label=planned)
            axes.set_xticks(list(places), names, fontsize=7)
            axes.set_title(title, fontsize=9)
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
