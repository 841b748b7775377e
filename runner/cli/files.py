"""The files that a command's flags name: checked before anything is done, then written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import Problem, RequestError

__all__ = ["unwritable", "write"]


def unwritable(arguments: Arguments, flags: Iterable[str]) -> list[Problem]:
    """A problem for each of the flags' files that cannot be there."""
    files = [(flag, Path(file)) for flag in flags if (file := arguments.value(flag)) is not None]
    return [
        Problem(f"--{flag}", file, "must be a file in a folder that exists", fix=f"--{flag} {file.name}")
        for flag, file in files
        if file.is_dir() or not file.absolute().parent.is_dir()
    ]


def write(flag: str, file: Path, text: str) -> None:
    """Write the file of a flag.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError([Problem(f"--{flag}", file, "cannot be written", str(error))]) from error
