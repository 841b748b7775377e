"""Draws figures of runs as PNG files. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.units import byte_unit
from runner.report.read import Report, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_figures"]

_MANY = 12  # with more lines than this a legend would be unreadable, so there is none


def draw_figures(report: Report, directory: Path) -> list[Path]:
    """Draw every figure for which the records have data into ``directory``, and return the files."""
    drawn = [
        _losses(report.runs, directory / "loss.png"),
        _step_seconds(report.runs, directory / "step_seconds.png"),
        _memory(report.runs, directory / "memory.png"),
    ]
    return [path for path in drawn if path is not None]


def _losses(runs: Sequence[Run], path: Path) -> Path | None:
    shown = [run for run in runs if run.record.loss]
    if not shown:
        return None
    figure, axes = _figure("optimizer step", "loss")
    for run in shown:
        steps = range(1, len(run.record.loss) + 1)
        (line,) = axes.plot(steps, [_number(value) for value in run.record.loss], label=run.name, linewidth=1)
        if run.record.val_loss:
            at, values = zip(*run.record.val_loss, strict=True)
            heights = [_number(value) for value in values]
            axes.plot(at, heights, "o", color=line.get_color(), label=f"{run.name}, validation", markersize=4)
    return _save(figure, axes, path, len(shown))


def _step_seconds(runs: Sequence[Run], path: Path) -> Path | None:
    shown = [run for run in runs if any(value for value in run.record.seconds.values())]
    if not shown:
        return None
    figure, axes = _figure("run", "seconds of a median step, mean over ranks")
    names = [run.name for run in shown]
    bottom = [0.0] * len(shown)
    for part in dict.fromkeys(part for run in shown for part in run.record.seconds):
        heights = [run.record.seconds.get(part) or 0.0 for run in shown]
        axes.bar(names, heights, bottom=bottom, label=part, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    return _save(figure, axes, path, 1)


def _memory(runs: Sequence[Run], path: Path) -> Path | None:
    rows = [
        (f"{run.name}: rank {rank}" if len(runs) > 1 else f"rank {rank}", _at(run, "predicted", rank), measured)
        for run in runs
        for rank, measured in enumerate(run.record.peak_memory_bytes.get("measured") or [])
    ]
    if not rows:
        return None
    unit, scale = byte_unit(max(seen or 0 for *_, seen in rows))
    figure, axes = _figure("", f"peak memory, {unit}")
    places = range(len(rows))
    axes.bar([at - 0.2 for at in places], [predicted / scale for _, predicted, _ in rows], width=0.4, label="predicted")
    axes.bar([at + 0.2 for at in places], [(seen or 0) / scale for *_, seen in rows], width=0.4, label="measured")
    axes.set_xticks(list(places), [name for name, *_ in rows], rotation=45 if len(rows) > 4 else 0, ha="right")
    return _save(figure, axes, path, 1)


def _at(run: Run, which: str, rank: int) -> float:
    values = run.record.peak_memory_bytes.get(which) or []
    return float(values[rank]) if rank < len(values) and values[rank] is not None else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _figure(x_label: str, y_label: str) -> tuple[Any, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Axes, path: Path, num_lines: int) -> Path:
    if num_lines <= _MANY:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
