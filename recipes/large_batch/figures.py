"""Losses by batch size and rule, and the variance of gradients beside 1/B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.recipes.large_batch.rules import RULES

__all__ = ["draw"]


def draw(path: Path, made: Mapping[str, Any]) -> Path:
    """Draw three panels into an SVG file: validation loss, sharpness, variance of gradients."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "large batch"}):  # the same bytes for the same figures
        figure = Figure(figsize=(10.0, 3.4), layout="constrained")
        losses, sharpness, noise = figure.subplots(1, 3)
        for rule in RULES:
            rows = [row for row in made["rows"] if row["rule"] == rule and "val" in row]
            batches = [row["batch"] for row in rows]
            losses.plot(batches, [row["val"] for row in rows], "o-", linewidth=1.2, markersize=3, label=rule)
            sharpness.plot(batches, [row["sharpness"] for row in rows], "o-", linewidth=1.2, markersize=3)
        for when, found in made["noise"].items():
            batches = [each["batch"] for each in found]
            noise.plot(batches, [each["variance"] for each in found], "o", markersize=3, label=when)
            line = [found[0]["variance"] * batches[0] / batch for batch in batches]
            noise.plot(batches, line, "k:", linewidth=0.8)
        for axes, name in ((losses, "validation loss"), (sharpness, "sharpness"), (noise, "variance of gradients")):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("samples of a batch")
            axes.set_ylabel(name)
        losses.set_ylim(top=min(8.0, losses.get_ylim()[1]))
        sharpness.set_yscale("log")
        noise.set_yscale("log")
        losses.legend(frameon=False, fontsize=8)
        noise.legend(frameon=False, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
