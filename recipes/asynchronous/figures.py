"""The recipe's two figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.recipes.asynchronous.delay import DEPTHS
from runner.recipes.asynchronous.model import entropy
from runner.recipes.asynchronous.schedules import RATES, Result

__all__ = ["draw_curves", "draw_delays"]


def draw_delays(best: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Draw the best loss of each optimizer against the number of stages.

    Args:
        best: for each optimizer, the loss and its rate at each depth.
        path: the file.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.add_subplot()
    for name, row in best.items():
        points = [(depth, loss) for depth, (loss, _) in zip(DEPTHS, row, strict=True) if math.isfinite(loss)]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(entropy(), color="grey", linewidth=0.8, linestyle="--", label="least possible loss")
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    axes.set_xlabel("stages D; the first stage is D - 1 steps late")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_curves(results: Iterable[Result], path: Path) -> None:
    """Draw the training loss by samples: all schedules with AdamW, and those with momentum at each rate."""
    figure = _figure(9.0, 7.0)
    titles = {"AdamW, rate 0.003": "", **{f"SGD, momentum 0.9, rate {rate:g}": f", SGD {rate:g}" for rate in RATES}}
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (title, suffix) in zip(panels.flat, titles.items(), strict=True):
        chosen = [each for each in results if each.label.endswith(suffix) and ("SGD" in each.label) == bool(suffix)]
        for number, each in enumerate(chosen):
            style = ("-", "--", ":")[number // 10]
            axes.plot(*zip(*each.curve, strict=True), style, linewidth=1, label=each.label.removesuffix(suffix))
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(1.2, 4.0)
        axes.legend(frameon=False, fontsize=6, ncols=2)
    for axes in panels[1]:
        axes.set_xlabel("samples")
    for axes in panels[:, 0]:
        axes.set_ylabel("training loss")
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "asynchronous"}):  # the same bytes for the same figures
        figure.savefig(path, format="svg", metadata={"Date": None})
