"""Draws figures of runs as PNG files. matplotlib is imported only when a figure is drawn.

Runs are named by their overrides. A legend stands below the axes, where it covers nothing, and bars lie, so that there
is room for their names.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.units import byte_unit
from runner.printable import printable_line
from runner.report.labels import short_labels
from runner.report.read import Report, Run
from runner.report.speed import part_name
from runner.report.swept import curves, swept_keys

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_figures"]

_WIDTH = 7.0  # of a figure, in inches
_HEIGHT = 4.0  # of one without a legend
_MANY = 20  # with more lines than this only the best are named, and the others are grey
_BEST = 10  # lines that are named among many
_INCHES_PER_LETTER = 0.075  # in a legend
_INCHES_OF_A_LINE = 0.4  # the sample of an entry, and the gap to the next one
_INCHES_PER_ROW = 0.19
_DECADES = 10  # times the lowest value of a key, from which on its axis is logarithmic
_WIDE = 200  # times the lowest loss
_LONGEST_NAME = 84  # letters: what fits into one row of a legend
_WRAPPED_NAME = 44  # letters in a line beside a bar


def draw_figures(report: Report, directory: Path) -> list[Path]:
    """Draw every figure for which the records have data into ``directory``, and return the files."""
    named = [(_name(run, label), run) for run, label in zip(report.runs, short_labels(report), strict=True)]
    drawn = [
        _losses(named, directory / "loss.png"),
        _step_seconds(named, directory / "step_seconds.png"),
        _memory(named, directory / "memory.png"),
        *(_by_key(report, key, directory / f"loss_by_{key}.png") for key in swept_keys(report)),
    ]
    return [path for path in drawn if path is not None]


def _name(run: Run, label: str) -> str:
    name = f"{run.name}: {label}" if label else run.name
    return _plain(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…")


def _losses(named: Sequence[tuple[str, Run]], path: Path) -> Path | None:
    shown = [(name, run) for name, run in named if run.record.loss]
    if not shown:
        return None
    figure, axes = _figure("optimizer step", "loss", _HEIGHT)
    told = _told([run for _, run in shown])
    for (name, run), color in zip(shown, _colors(told), strict=True):
        steps = range(1, len(run.record.loss) + 1)
        style: dict[str, Any] = {"label": name} if color else {"zorder": 1}
        style["color"] = color or "0.8"
        axes.plot(steps, [_number(value) for value in run.record.loss], linewidth=1, **style)
        if run.record.val_loss and color:
            at, values = zip(*run.record.val_loss, strict=True)
            axes.plot(at, [_number(value) for value in values], "o", color=color, markersize=4)
    if any(run.record.val_loss for _, run in shown):
        axes.plot([], [], "o", color="0.4", markersize=4, label="validation")
    if _is_wide(value for _, run in shown for value in run.record.loss):
        axes.set_yscale("log")
    axes.locator_params(axis="x", integer=True)  # steps
    if not all(told):
        axes.plot([], [], color="0.8", linewidth=1, label=f"{told.count(False)} others")
    return _save(figure, axes, path)


def _by_key(report: Report, key: str, path: Path) -> Path | None:
    """The last loss against a number that was swept; one line for each combination of what else differs."""
    drawn = curves(report, key)
    if not drawn:
        return None
    figure, axes = _figure(_plain(key), "last loss", _HEIGHT)
    for name, points in drawn:
        label: dict[str, Any] = {"label": _plain(name)} if name else {}
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", linewidth=1, markersize=4, **label)
    values = [x for _, points in drawn for x, _ in points]
    if min(values) > 0 and max(values) >= _DECADES * min(values):
        axes.set_xscale("log")
    if _is_wide(y for _, points in drawn for _, y in points):
        axes.set_yscale("log")
    return _save(figure, axes, path)


def _is_wide(losses: Iterable[float | None]) -> bool:
    """Whether losses are so far apart that only a logarithmic axis shows the lower ones, as where one diverges."""
    values = [value for value in losses if value is not None and math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > _WIDE * min(values)


def _told(runs: Sequence[Run]) -> list[bool]:
    """Which lines are named: all, or of many those with the lowest last loss."""
    order = sorted(range(len(runs)), key=lambda at: (math.isnan(_last(runs[at])), _last(runs[at])))
    best = set(order if len(runs) <= _MANY else order[:_BEST])
    return [at in best for at in range(len(runs))]


def _last(run: Run) -> float:
    return _number(run.val_loss if run.val_loss is not None else run.loss)


def _colors(told: Sequence[bool]) -> list[Any]:
    """A colour for each line that is named, all different; None for another."""
    import matplotlib

    count = sum(told)
    scale = matplotlib.colormaps["tab10" if count <= 10 else "turbo"]
    colors = iter([scale(at) if count <= 10 else scale(at / (count - 1)) for at in range(count)])
    return [next(colors) if each else None for each in told]


def _step_seconds(named: Sequence[tuple[str, Run]], path: Path) -> Path | None:
    shown = [(name, run) for name, run in named if any(value for value in run.record.seconds.values())]
    if not shown:
        return None
    figure, axes = _bars([name for name, _ in shown], "seconds of a median step, mean over ranks")
    left = [0.0] * len(shown)
    for part in dict.fromkeys(part for _, run in shown for part in run.record.seconds):
        widths = [run.record.seconds.get(part) or 0.0 for _, run in shown]
        axes.barh(range(len(shown)), widths, left=left, label=part_name(part), height=0.6)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    return _save(figure, axes, path)


def _memory(named: Sequence[tuple[str, Run]], path: Path) -> Path | None:
    rows = [
        (f"{name}, rank {rank}" if len(named) > 1 else f"rank {rank}", _at(run, "predicted", rank), measured)
        for name, run in named
        for rank, measured in enumerate(run.record.peak_memory_bytes.get("measured") or [])
    ]
    if not rows:
        return None
    unit, scale = byte_unit(max(seen or 0 for *_, seen in rows))
    figure, axes = _bars([name for name, *_ in rows], f"peak memory, {unit}")
    places = range(len(rows))
    axes.barh([at - 0.2 for at in places], [planned / scale for _, planned, _ in rows], height=0.4, label="predicted")
    axes.barh([at + 0.2 for at in places], [(seen or 0) / scale for *_, seen in rows], height=0.4, label="measured")
    return _save(figure, axes, path)


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: dollars would begin a formula."""
    return printable_line(text).replace("$", r"\$")


def _at(run: Run, which: str, rank: int) -> float:
    values = run.record.peak_memory_bytes.get(which) or []
    return float(values[rank]) if rank < len(values) and values[rank] is not None else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _bars(names: Sequence[str], label: str) -> tuple[Any, Axes]:
    """Axes for one lying bar per name, the first at the top."""
    figure, axes = _figure(label, "", 1.2 + 0.3 * len(names))
    wrapped = ["\n".join(textwrap.wrap(name, _WRAPPED_NAME)) for name in names]
    axes.set_yticks(range(len(names)), wrapped, fontsize="small")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _figure(x_label: str, y_label: str, height: float) -> tuple[Any, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, axes: Axes, path: Path) -> Path:
    """Write the figure with its legend below the axes; the figure grows by the legend's rows."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, int(_WIDTH / (max(map(len, names), default=1) * _INCHES_PER_LETTER + _INCHES_OF_A_LINE)))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + rows * _INCHES_PER_ROW)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    return path
