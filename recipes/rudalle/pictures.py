"""Pictures of a run as PNG files: the tokenizer's reconstructions, samples for captions, the loss curve."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

__all__ = ["draw_curve", "draw_reconstructions", "draw_samples"]

_DPI = 110
_COLUMNS = 12
_LETTERS = 16  # of a line in the width of a sample


def draw_reconstructions(path: Path, originals: Tensor, decoded: Tensor) -> None:
    """Rows of originals over what is left of them after the tokenizer; both uint8 [n, size, size, 3]."""
    count = len(originals)
    num_rows = -(-count // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * 0.75, num_rows * 1.6 + 0.4), layout="constrained")
    cells = figure.subplots(2 * num_rows, _COLUMNS, squeeze=False)
    figure.suptitle("Original, and below it what the image tokenizer keeps", fontsize=10)
    for index in range(num_rows * _COLUMNS):
        row, column = 2 * (index // _COLUMNS), index % _COLUMNS
        _show(cells[row][column], originals[index] if index < count else None)
        _show(cells[row + 1][column], decoded[index] if index < count else None)
    figure.savefig(path, dpi=_DPI)


def draw_samples(path: Path, captions: Sequence[str], notes: Sequence[str], images: Tensor) -> None:
    """A column per caption with its samples; ``notes`` go below the captions.

    Args:
        captions, notes: one per column.
        images: uint8 [captions, samples, size, size, 3].
    """
    num_columns, num_rows = images.shape[:2]
    figure = Figure(figsize=(num_columns * 1.35, num_rows * 1.2 + 0.7), layout="constrained")
    cells = figure.subplots(num_rows, num_columns, squeeze=False)
    for column, (caption, note) in enumerate(zip(captions, notes, strict=True)):
        cells[0][column].set_title(f"{_wrapped(caption)}\n({note})", fontsize=8)
        for row in range(num_rows):
            _show(cells[row][column], images[column, row])
    figure.savefig(path, dpi=_DPI)


def draw_curve(
    path: Path, losses: Sequence[float], validations: Sequence[Sequence[float]], baselines: Mapping[str, float]
) -> None:
    """Training loss per step, validation loss [[step, value], …], and baselines as horizontal lines (nats)."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=0.8, alpha=0.7, label="training")
    if validations:
        steps, values = zip(*validations, strict=True)
        axes.plot(steps, values, "o-", color="tab:orange", markersize=4, label="validation")
    for name, value in baselines.items():
        axes.axhline(value, color="0.6", linewidth=0.8, linestyle="--")
        axes.annotate(f"{name.replace('_', ' ')}\n{value:.2f}", (1.01, value), xycoords=("axes fraction", "data"),
                      ha="left", va="center", fontsize=8, color="0.4")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per image token)", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)  # where it covers nothing
    figure.savefig(path, dpi=_DPI)


def _wrapped(caption: str) -> str:
    """The caption's first word, and below it the others."""
    first, *others = caption.replace("-", "- ", 1).split(" ")
    return "\n".join([first, *textwrap.wrap(" ".join(others), _LETTERS)])


def _show(axes: Axes, image: Tensor | None) -> None:
    axes.set_axis_off()
    if image is not None:
        axes.imshow(np.asarray(image), interpolation="nearest")
