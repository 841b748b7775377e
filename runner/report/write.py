"""Makes the report of a directory: reads the records, draws figures and writes them beside the records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from runner.printable import markdown_text
from runner.report.ending import other_times
from runner.report.figures import draw_figures
from runner.report.order import in_order
from runner.report.read import Report
from runner.report.recipe import recipe_report, refusal
from runner.report.several import read_reports
from runner.report.tables import TextTable, differences_table, predicted_measured_table, runs_table, seconds_table

__all__ = ["REPORT_DIRECTORY", "report", "tables"]

logger = logging.getLogger(__name__)

REPORT_DIRECTORY = "report"


def report(
    directory: Path | str | Sequence[Path | str],
    *,
    write: bool = True,
    sort: str | None = None,
    allowed: Collection[str] = (),
) -> Report:
    """Read the records under ``directory`` and, if ``write``, write tables and figures to its subfolder ``report/``.

    It works on a run or a sweep, finished or not, on a folder of such, and on several, whose report lies in the folder
    that they have in common. Files: ``report.md``, one CSV per table, one PNG per figure.

    Args:
        sort: a column of the table of runs, by which tables and figures are ordered (:func:`in_order`).
        allowed: functions that a sweep's records may name besides the shipped ones, ``package.module:function`` each.

    Raises:
        RequestError: there is no record under ``directory``, or no such column.
    """
    named = [directory] if isinstance(directory, Path | str) else directory
    found = read_reports([Path(each) for each in named])
    found = found if sort is None else in_order(found, sort)
    if told := refusal(found, allowed):
        logger.warning("%s", told)
    if write:
        place = found.directory / REPORT_DIRECTORY
        place.mkdir(exist_ok=True)
        drawn = [*draw_figures(found, place), *recipe_report(found, allowed).draw(place)]
        _write_tables(found, place, drawn, allowed)
    return found


def tables(found: Report, allowed: Collection[str] = ()) -> dict[str, TextTable]:
    """The tables of the report by the name of their file; ``allowed`` is that of :func:`report`.

    There is always one of all runs; for a sweep also those of its recipe, for a single run also its prediction and its
    time. Several runs stand side by side.
    """
    several = len(found.runs) > 1 and not found.is_sweep
    shown = {"differences": differences_table(found)} if several else {}
    shown["runs"] = runs_table(found)
    if found.is_sweep:
        shown |= recipe_report(found, allowed).tables
    elif len(found.runs) == 1:
        record = found.runs[0].record
        shown["predicted_measured"] = replace(predicted_measured_table(record), notes=tuple(other_times(record)))
        if any(value is not None for value in record.seconds.values()):
            shown["seconds"] = seconds_table(record)
    return shown


def _write_tables(found: Report, place: Path, figures: list[Path], allowed: Collection[str]) -> None:
    shown = tables(found, allowed)
    for name, table in shown.items():
        (place / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
    pictures = "\n".join(f"![{figure.stem}]({figure.name})" for figure in figures)
    title = f"# {markdown_text(found.directory.resolve().name)}"
    text = "\n".join([title, "", *(table.markdown() for table in shown.values()), pictures])
    (place / "report.md").write_text(text.rstrip() + "\n", encoding="utf-8")
