"""The picture of the image part: accuracy by step, and what the networks see in drawings that none was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.recipes.finetune.drawings import GROUPS, Drawings

__all__ = ["draw"]

_COLUMNS, _ROWS = 7, 3


def draw(document: Mapping[str, Any], held_out: Drawings, path: Path) -> None:
    """Draw the runs' accuracies, and the first held-out drawings with the groups that the first and last run see.

    Args:
        document: what :func:`runner.recipes.finetune.images.measure` returns.
        held_out: the drawings that were predicted, in that order.
        path: the PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(3, 7))  # an array of two
    left, right = halves
    axes = left.subplots()
    for name, found in document["runs"].items():
        axes.plot(*zip(*found["val_accuracy"], strict=True), marker=".", label=name)
    axes.set(xlabel="step", ylabel="accuracy on held-out drawings", ylim=(0, 1))
    left.legend(loc="outside upper center", fontsize=7, frameon=False)
    first, *_, last = document["runs"].values()
    right.suptitle("held out: fine-tuned (above), from scratch (below); wrong in red", fontsize=9)
    cells = right.subplots(_ROWS, _COLUMNS)
    for number, cell in enumerate(cells.flat):
        _draw_one(cell, held_out, number, (first["predicted"], last["predicted"]))
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _draw_one(cell: Any, held_out: Drawings, number: int, predicted: Sequence[Sequence[int]]) -> None:
    cell.imshow(held_out.pixels[number])
    cell.set_axis_off()
    for height, found in zip((1.16, 1.02), predicted, strict=True):
        right = found[number] == held_out.groups[number]
        word = GROUPS[found[number]].split(" ")[0]
        cell.text(0.5, height, word, transform=cell.transAxes, ha="center", fontsize=7, color="0.2" if right else "red")
