"""Reads rows from local files by the library ``datasets``, without its own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "files_of", "read_rows"]

KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
"""How a file is read, by the end of its name; a text file is one document."""


def files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder and its folders, by name; all are of one kind.

    Raises:
        ValueError: there is none, or there are several kinds.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there")
    known = f"a file of these kinds: {', '.join(KINDS)}"
    if path.is_file():
        if path.suffix not in KINDS:
            raise ValueError(f"{path} is not {known}")
        return [path]
    found = sorted(each for each in path.rglob("*") if each.suffix in KINDS and each.is_file())
    if not found:
        raise ValueError(f"{path} has not {known}")
    if len({KINDS[each.suffix] for each in found}) > 1:
        ends = ", ".join(sorted({each.suffix for each in found}))
        raise ValueError(f"{path} has files of several kinds ({ends}): name a folder with one of them")
    return found


def read_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of some files of one kind, in order.

    Args:
        columns: the names of the columns that a row must have.

    Raises:
        ValueError: a file cannot be read, or lacks a column.
    """
    for file in files:
        rows = _rows(file)
        number = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                break
            except Exception as error:
                raise ValueError(f"{file} cannot be read after row {number}: {_first_line(error)}") from error
            number += 1
            _require(row, columns, file, number)
            yield row


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import datasets

    stream = datasets.IterableDataset
    readers: dict[str, Callable[[], Any]] = {
        "json": lambda: stream.from_json(str(file)),
        "parquet": lambda: stream.from_parquet(str(file)),
        "text": lambda: stream.from_text(str(file), sample_by="document"),
    }
    yield from readers[KINDS[file.suffix]]()


def _require(row: dict[str, Any], columns: Sequence[str], file: Path, number: int) -> None:
    for column in columns:
        if column not in row:
            raise ValueError(
                f"{file} has no column {column}: its columns are {', '.join(row)}; data.kwargs.form and "
                "data.kwargs.text, .prompt, .completion and .messages say which are read"
            )
        if row[column] is None:
            raise ValueError(f"{file} has nothing in the column {column} of row {number}")


def _first_line(error: Exception) -> str:
    cause: BaseException = error.__cause__ or error  # datasets wraps what the reader of a format says
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}".rstrip(": ")
