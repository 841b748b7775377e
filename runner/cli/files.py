"""The files that a command's flags name: checked before anything is done, then written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import Problem, RequestError

__all__ = ["unwritable", "write"]

_ENDINGS = {"svg": ".svg", "csv": ".csv", "trace": ".json"}
_KINDS = {"svg": "a picture in SVG", "csv": "a table of cells", "trace": "a Chrome trace in JSON"}
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".eps", ".ps", ".bmp", ".tif", ".tiff")


def unwritable(arguments: Arguments, flags: Iterable[str]) -> list[Problem]:
    """A problem for each of the flags' files that cannot be there, or whose name says that it is something else."""
    files = [(flag, Path(file)) for flag in flags if (file := arguments.value(flag)) is not None]
    return [problem for flag, file in files for problem in _problems(flag, file)]


def _problems(flag: str, file: Path) -> Iterator[Problem]:
    if file.is_dir() or not file.absolute().parent.is_dir():
        yield Problem(f"--{flag}", file, "must be a file in a folder that exists", fix=f"--{flag} {file.name}")
    ending = _ENDINGS.get(flag, file.suffix)
    if file.suffix.lower() in {*_PICTURES, *_ENDINGS.values()} - {ending}:
        why = f"What is written there is {_KINDS[flag]}, whatever the name says"
        yield Problem(f"--{flag}", file, f"must end in {ending}", why, f"--{flag} {file.with_suffix(ending)}")


def write(flag: str, file: Path, text: str) -> None:
    """Write the file of a flag.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError([Problem(f"--{flag}", file, "cannot be written", str(error))]) from error
