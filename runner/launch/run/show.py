"""Shows a complete run: its predictions beside its measurements, its results, and where its files are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.printable import printable_line
from runner.record import RunRecord

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show"]


def show(record: RunRecord, run_dir: Path, console: Console | None = None) -> None:
    """Print the end of a run.

    Args:
        record: its record.
        run_dir: its directory as it is shown.
        console: where; default standard output.
    """
    from rich.console import Console

    from runner.report.ending import files, results
    from runner.report.tables import predicted_measured_table

    console = console or Console()
    console.print(predicted_measured_table(record))
    for line in results(record):
        console.print(printable_line(line), markup=False, highlight=False)
    for line in files(record, run_dir):  # a path is copied as a whole
        console.print(printable_line(line), markup=False, highlight=False, soft_wrap=True)
