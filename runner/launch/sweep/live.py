"""The table of a sweep that changes in place on a terminal, with the log lines above it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO, cast

from runner.report.read import Report
from runner.report.tables import TextTable, runs_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["in_place", "part_of_table"]

_REFRESHES_PER_SECOND = 0.5
_AROUND_ROWS = 8  # lines of a table that are no rows: title, header of two lines, notes, and the line of the cursor


@contextlib.contextmanager
def in_place(read: Callable[[], Report], console: Console) -> Iterator[None]:
    """On a terminal, show the table of the runs that ``read`` finds while the block runs, and take it away at its end.

    What this process logs or prints meanwhile stands above the table. Without a terminal nothing is shown.
    """
    if not console.is_terminal or console.quiet:
        yield
        return
    from rich.live import Live

    view = _View(read, console)
    with Live(
        get_renderable=view,  # type: ignore[arg-type]  # a renderable is anything with __rich_console__
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        vertical_overflow="crop",
    ) as live:
        try:
            live.refresh()
            with _log_above(console):
                yield
        finally:
            view.has_ended = True


@dataclass
class _View:
    """What the terminal shows now.

    At the end it is empty: rich draws the last picture in full height, and could not take away what has scrolled.
    """

    read: Callable[[], Report]
    console: Console
    has_ended: bool = False

    def __call__(self) -> object:
        return "" if self.has_ended else part_of_table(self.read(), self.console.size.height)


def part_of_table(report: Report, height: int) -> TextTable:
    """The table of a sweep, or so many rows around the first unfinished job as a terminal of ``height`` lines has."""
    table, room = runs_table(report), max(1, height - _AROUND_ROWS)
    if len(table.rows) <= room:
        return replace(table, notes=table.notes[: room - len(table.rows) + 1])
    unfinished = (at for at, run in enumerate(report.runs) if run.record.status in ("running", "waiting"))
    first = min(max(0, next(unfinished, 0) - room // 2), len(table.rows) - room)
    told = f"jobs {first} to {first + room - 1} of 0 to {len(table.rows) - 1}"
    return replace(table, rows=table.rows[first : first + room], notes=(told, *table.notes[:1]))


@contextlib.contextmanager
def _log_above(console: Console) -> Iterator[None]:
    """Have log lines that go to a terminal printed above the table, which would otherwise be drawn into them."""
    from rich.file_proxy import FileProxy

    loggers = [logging.getLogger(), logging.getLogger("runner")]
    found = [handler for one in loggers for handler in one.handlers if isinstance(handler, logging.StreamHandler)]
    handlers = {each: each.stream for each in found if not each.stream.closed and each.stream.isatty()}
    for handler, stream in handlers.items():
        handler.setStream(cast(TextIO, FileProxy(console, stream)))
    try:
        yield
    finally:
        for handler, stream in handlers.items():
            handler.setStream(stream)
