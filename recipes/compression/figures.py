"""Loss curves of a sweep's runs, each smoothed by a running mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Curve", "draw"]

_WINDOW = 10  # steps of the running mean
_POINTS = 60  # of a curve, so that the file is small


class Curve(NamedTuple):
    """A run's name and the loss of each step."""

    name: str
    losses: Sequence[float]


def draw(path: Path, curves: Sequence[Curve]) -> Path:
    """Draw the curves into an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "compression"}):  # the same bytes for the same figures
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for number, curve in enumerate(curves):
            style = ("-", "--", ":")[number % 3]
            axes.plot(*zip(*_smooth(curve.losses), strict=True), style, linewidth=1.2, label=curve.name)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(f"training loss, mean of {_WINDOW} steps")
        axes.legend(frameon=False, fontsize=8, ncols=2)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _smooth(losses: Sequence[float]) -> list[tuple[int, float]]:
    """A step and the mean of the losses up to it."""
    stride = max(1, len(losses) // _POINTS)
    means = ((end, losses[max(0, end - _WINDOW) : end]) for end in range(stride, len(losses) + 1, stride))
    return [(end, sum(window) / len(window)) for end, window in means]
