"""A figure for each model: the peak and the FLOPs of every strategy, and of those that choose by budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_MARKERS = "osD^v<>Pp*Xhd"  # of strategies without a budget


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write a figure for each model into ``folder``, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(name, found, folder / f"{name.lower()}.svg") for name, found in document["models"].items()]


def _draw(name: str, found: Mapping[str, Any], path: Path) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        plain = found["plain_bytes"]
        for number, (budgeted, rows) in enumerate(found["budgets"].items()):
            points = [(row["measured_bytes"] / plain, row["measured_flops"]) for row in rows if "measured_bytes" in row]
            if points:
                style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 5 % 3]}
                axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=budgeted, zorder=1, **style)
        for number, (strategy, row) in enumerate(found["strategies"].items()):
            point = row["measured_bytes"] / plain, row["measured_flops"]
            axes.scatter(*point, label=strategy, color="0.3", s=14, marker=_MARKERS[number % len(_MARKERS)], zorder=2)
        axes.set_xlabel("peak of activations, measured, as a part of that without a strategy")
        axes.set_ylabel("FLOPs, measured, by those without")
        axes.set_xlim(0, 1.05)
        figure.legend(fontsize=7, ncols=1, loc="outside right upper")
        axes.set_title(f"{name}, {found['layers']} layers", loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
