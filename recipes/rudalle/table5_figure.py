"""The published memory and ours, each as a ratio to Adam without sharing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.recipes.rudalle.table5 import NAMES, OPTIMIZERS, PUBLISHED, STAGES, Cell, Key

__all__ = ["draw"]

_WIDTH = 0.15  # of a bar; a stage is 1 wide


def draw(path: Path, cells: Mapping[Key, Cell]) -> Path:
    """Two panels of bars by stage and optimizer; what did not run has none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    ours = {key: cell.state_bytes for key, cell in cells.items() if cell.state_bytes}
    panels = (
        (left, {key: figures[0] for key, figures in PUBLISHED.items()}, "paper: all reserved memory"),
        (right, ours, "here: weights, gradients, optimizer states"),
    )
    for axes, figures, title in panels:
        base = figures.get(("adam", 0))
        for number, optimizer in enumerate(OPTIMIZERS):
            places = [stage + (number - 2) * _WIDTH for stage in STAGES]
            heights = [figures.get((optimizer, stage), 0.0) / base if base else 0.0 for stage in STAGES]
            axes.bar(places, heights, width=_WIDTH, label=NAMES[optimizer])
        axes.set_title(title)
        axes.set_xticks(STAGES, [f"ZeRO {stage}" for stage in STAGES])
        axes.grid(axis="y", alpha=0.3)
    left.set_ylabel("ratio to Adam, ZeRO 0")
    bars = right.get_legend_handles_labels()
    figure.legend(*bars, loc="outside lower center", ncols=len(OPTIMIZERS), fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    return path
