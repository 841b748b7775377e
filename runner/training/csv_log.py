"""The CSV log of a run: its file holds whole rows alone, each once, whatever fails while it is written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from runner.files import remove_unfinished, write_atomically

__all__ = ["CsvRows"]

_STEP = "step"


class CsvRows(ExperimentWriter):
    """Writes the rows of Lightning's CSVLogger, after those of an earlier process.

    Lightning's own deletes the file at its start, and empties it whenever a row has a figure that no row before had: if
    the disk is full just then, all rows are lost. A row that was half written is appended once more. Here a new figure
    brings a new file, which takes the name of the old one when it is complete. Other rows are appended to what is known
    to be good, so that a row that is written again is there once.

    Args:
        log_dir: the folder of the file.
        steps: the rows of so many steps, counted from 1, are kept.

    Raises:
        OSError: the file system refuses.

    Attributes:
        of_last_step: the names of what the file says of the last step that is kept.
    """

    def __init__(self, log_dir: str, steps: int) -> None:
        super().__init__(log_dir)
        self._path = Path(self.metrics_file_path)
        self._size = 0  # bytes of the file that are good
        self._kept = 0  # rows of the file that are good: a write that failed may have brought more
        remove_unfinished(self._path.parent, [self._path.name])
        rows = [row for row in _rows(self._path) if int(row[_STEP]) <= steps]
        self.of_last_step = {name for row in rows if int(row[_STEP]) == steps for name in row if row[name]}
        if rows:
            self._replace(list(rows[0]), rows)
        else:
            self._path.unlink(missing_ok=True)

    def save(self) -> None:
        """Write the rows that have been logged since the last call; if it fails, the next call writes them.

        Raises:
            OSError: the file system refuses.
        """
        if not self.metrics:
            return
        names = sorted({*self.metrics_keys, *(name for row in self.metrics for name in row)})
        if names == self.metrics_keys and self._path.exists():
            self._append(self.metrics)
        else:
            self._replace(names, [*_rows(self._path)[: self._kept], *self.metrics])
        self.metrics = []

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = _text(self.metrics_keys, rows).encode()
        with self._path.open("r+b") as file:
            size = min(self._size, file.seek(0, io.SEEK_END))
            file.truncate(size)  # a write that failed may have left a part of a row
            file.seek(size)
            file.write(text)
        self._size = size + len(text)
        self._kept += len(rows)

    def _replace(self, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        text = _text(names, [dict(zip(names, names, strict=True)), *rows])
        write_atomically(self._path, text)
        self.metrics_keys, self._size, self._kept = list(names), len(text.encode()), len(rows)

    def _check_log_dir_exists(self) -> None:
        """Keep the file of an earlier process, which Lightning's own deletes."""


def _rows(file: Path) -> list[dict[str, str]]:
    """The rows of a file, or none if there is none.

    A last row that a killed writer did not complete is left out.
    """
    if not file.exists():
        return []
    text = file.read_bytes().decode("utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1].replace("\0", "")  # a machine that crashes may leave zeros at the end
    rows = [row for row in csv.DictReader(io.StringIO(complete, newline="")) if str(row.get(_STEP)).isdecimal()]
    return [row for row in rows if None not in row and None not in row.values()]


def _text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, fieldnames=names).writerows(rows)
    return text.getvalue()
