"""Writes files so that they appear under their name complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from runner.errors import RunFailedError
from runner.files import make_directories, new_file_beside, sync_directory

__all__ = ["TEMPORARY", "CheckpointError", "durably", "first_line"]

TEMPORARY = ".unfinished-"
"""Prefix of the names of files that are being written, or that a killed writer left behind."""


class CheckpointError(Exception):
    """A file is not a valid checkpoint; the message says why."""


@contextlib.contextmanager
def durably(path: Path) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, its content becomes ``path``, durably.

    Raises:
        RunFailedError: the file system refuses, or what was written could not be read again.
    """
    temporary: Path | None = None
    try:
        make_directories(path.parent)
        handle, temporary = new_file_beside(path, TEMPORARY)
        os.close(handle)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        if isinstance(error, CheckpointError):
            raise RunFailedError(
                f"the checkpoint {path} could not be loaded again: {error}; the state of callbacks, too, must be "
                "tensors and plain values, or, in whole files, of classes that checkpoint.allow_pickle names"
            ) from error
        # torch raises its own error on top of the cause.
        if isinstance(error, OSError | RuntimeError | SafetensorError):
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise RunFailedError(f"{path} could not be written: {first_line(cause)}") from error
        raise


def first_line(error: BaseException) -> str:
    """The message of an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), None)
    return (named or (lines[0] if lines else type(error).__name__)).rstrip(".")
