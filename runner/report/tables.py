"""Tables as values, and their three output forms: terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.config.units import format_bytes, format_seconds
from runner.printable import markdown_text, printable_line
from runner.record import ASKED_WORDS, RunRecord
from runner.report.best import LOSSES, best_of, figure_of, figures_of
from runner.report.fit import fitted
from runner.report.labels import chosen_layout, has_overrides, labels
from runner.report.read import Report, Run
from runner.report.speed import part_name, speeds_of

if TYPE_CHECKING:
    from rich.console import RenderResult

__all__ = [
    "Comparison",
    "TextTable",
    "differences_table",
    "predicted_measured",
    "predicted_measured_table",
    "runs_table",
    "seconds_table",
]

_UNKNOWN = "-"
_BEST = " *"  # after the name of the best run
_NARROW = ("run", "status", "loss", "val loss", "step", "peak memory", "predicted", "measured", "error")


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text cells for people and as plain values for CSV.

    Args:
        title, header, rows: the texts that are shown.
        value_header, values: the values that are written to CSV; they may have more columns than are shown.
        notes: lines below the table.
        spare: columns that a narrow terminal leaves out, the last one first.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    value_header: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table in GitHub's Markdown, under a heading."""
        lines = [
            f"### {markdown_text(self.title)}",
            "",
            _markdown_row(self.header),
            _markdown_row(["---"] * len(self.header)),
        ]
        lines += [_markdown_row(row) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {markdown_text(note)}" for note in self.notes)]
        return "\n".join([*lines, ""])

    def csv(self) -> str:
        """The table as comma-separated values, with numbers in full precision."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.value_header)
        writer.writerows(self.values)
        return text.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> RenderResult:
        """How rich prints it: a title, columns that do not break words, and notes over the full width."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        rigid = [*_NARROW, *self.spare]
        shown = fitted(self.header, self.rows, options.max_width, rigid=rigid, spare=self.spare)
        table = Table(
            title=Text(printable_line(self.title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name, free in zip(shown.header, shown.is_free, strict=True):
            lines = "\n".join(map(printable_line, name.split("\n")))
            table.add_column(Text(lines), overflow="fold", no_wrap=not free)
        for row in shown.rows:
            table.add_row(*(Text(printable_line(cell)) for cell in row), style="bold" if row[0].endswith(_BEST) else "")
        yield table
        left_out = [f"not shown, for lack of room: {', '.join(shown.left_out)}"] if shown.left_out else []
        for note in (*left_out, *self.notes):
            yield Text(printable_line(note))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity, predicted and measured, in base units; None if it is not known."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def predicted_measured(record: RunRecord) -> list[Comparison]:
    """Step seconds, bubble ratio and peak memory of every rank, each predicted and measured.

    One stage has no bubble.
    """
    seconds, bubble, memory = record.step_seconds, record.bubble_ratio, record.peak_memory_bytes
    predicted, measured = memory.get("predicted") or [], memory.get("measured") or []
    rows = [Comparison("step", seconds.get("predicted"), seconds.get("median"), "s")]
    if record.layout.get("pipeline") != 1:
        rows.append(Comparison("bubble ratio", bubble.get("predicted"), bubble.get("measured"), ""))
    for rank in range(max(len(predicted), len(measured))):
        rows.append(Comparison(f"peak memory, rank {rank}", _at(predicted, rank), _at(measured, rank), "B"))
    return rows


def predicted_measured_table(record: RunRecord) -> TextTable:
    """The table that is shown at the end of a run."""
    comparisons = predicted_measured(record)
    rows = tuple(
        (one.name, _shown(one.predicted, one.unit), _shown(one.measured, one.unit), _percent(one.relative_error))
        for one in comparisons
    )
    values = tuple((one.name, one.predicted, one.measured, one.relative_error) for one in comparisons)
    header = ("figure", "predicted", "measured", "error")
    return TextTable("predicted | measured", header, rows, header, values)


def seconds_table(record: RunRecord) -> TextTable:
    """How the time of a median step is spent."""
    known = {name: value for name, value in record.seconds.items() if value is not None}
    total = sum(known.values())
    rows = tuple(
        (part_name(name), format_seconds(value), f"{value / total:.1%}" if total else _UNKNOWN)
        for name, value in known.items()
    )
    values = tuple((name, value, value / total if total else None) for name, value in known.items())
    header = ("part", "seconds", "share")
    return TextTable("a median step", header, rows, header, values)


def _reasons(runs: Sequence[Run]) -> list[str]:
    """Why runs ended otherwise than well, with the names of all that ended so: many jobs of a sweep share a mistake."""
    ended: dict[str, list[str]] = {}
    for run in runs:
        if run.record.reason:
            ended.setdefault(run.record.reason, []).append(run.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in ended.items()]


def runs_table(report: Report) -> TextTable:
    """One row per run: what it is, how it ended, its figures. Failed and unsupported runs keep their reason.

    The jobs of a sweep are distinguished by their overrides, other runs by the fields that differ.
    """
    runs, (best, note) = report.runs, _best(report)
    own_of = labels(report)
    told = [] if not report.is_sweep else ["overrides" if has_overrides(report) else "differs"]
    searched = any(ASKED_WORDS in run.record.extras for run in runs)
    validated = any(run.record.val_loss for run in runs)
    metrics = [name for name in figures_of(runs) if name not in LOSSES]
    speeds = speeds_of(runs) if len(runs) > 1 else ()  # a single run has a table of them
    rows, values = [], []
    for index, run in enumerate(runs):
        own = [*([own_of[index]] if told else []), *([chosen_layout(run.record)] if searched else [])]
        name = f"{run.name}{_BEST}" if run is best else run.name
        seen = [_shown(run.val_loss, "")] if validated else []
        seen += [_shown(run.metrics.get(metric), "") for metric in metrics]
        fast = (speed.cell(run) for speed in speeds)
        figures = (_shown(run.median_seconds, "s"), *fast, _shown(run.peak_memory_bytes, "B"))
        rows.append((name, *own, _progress(run.record), _shown(run.loss, ""), *seen, *figures))
        exact = [run.loss, run.val_loss, *(run.metrics.get(metric) for metric in metrics)]
        exact += [run.median_seconds, run.record.samples_per_second, run.peak_memory_bytes]
        exact += [speed.of(run.record) for speed in speeds]
        configured = (configs[index] for configs in report.differing.values())
        ended = (run.record.status, run.record.steps)
        values.append((run.name, *own, *ended, *exact, run.record.reason or "", *configured))
    named, fast_names = [name.replace("_", " ", 1) for name in metrics], [speed.header for speed in speeds]
    seen_names = [*(["val loss"] if validated else []), *named]
    told += ["chosen"] if searched else []
    header = ("run", *told, "status", "loss", *seen_names, "step", *fast_names, "peak memory")
    exact_names = ("loss", "val_loss", *metrics, "median_step_seconds", "samples_per_second", "peak_memory_bytes")
    exact_names += tuple(speed.value_header for speed in speeds)
    value_header = ("run", *told, "status", "steps", *exact_names, "reason", *report.differing)
    notes = (*note, *_reasons(runs))
    if report.is_cut:
        notes += ("no process runs this sweep any more: its command, with run_dir, continues with the remaining jobs",)
    return TextTable("runs", header, tuple(rows), value_header, tuple(values), notes, (*named, *fast_names))


def differences_table(report: Report) -> TextTable:
    """Where runs of several directories lie, and what each of them has that not all have."""
    places = [os.path.relpath(run.directory, report.directory) for run in report.runs]
    rows = tuple(zip((run.name for run in report.runs), places, labels(report), strict=True))
    header = ("run", "place", "differs")
    return TextTable("what differs", header, rows, header, rows)


def _best(report: Report) -> tuple[Run | None, tuple[str, ...]]:
    """The best run of a sweep, and the note that says by what; nothing where fewer than two runs can be compared."""
    figure = figure_of(report.runs) if report.is_sweep else None
    if figure is None:
        return None, ()
    return best_of(report.runs, figure), (f"{_BEST.strip()} lowest {figure.replace('_', ' ')} of the complete runs",)


def _progress(record: RunRecord) -> str:
    """How a run ended or, if it is running, how far it is."""
    last = record.config.get("trainer", {}).get("max_steps")
    return f"{record.status} {record.steps}/{last}" if record.status == "running" and last else record.status


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    if unit == "B":
        return format_bytes(value)
    return format_seconds(value) if unit == "s" else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:+.1%}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, cells)) + " |"
