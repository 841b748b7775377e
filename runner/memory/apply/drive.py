"""Memory whose bytes lie in files of a drive, for what is at home in the host's memory or waits there.

A file is as long as its memory from the start, so that a full drive is told before anything is written. Its name is
removed at once: nothing is left behind, however the run ends. The operating system writes its pages out and reads them
again, as they are needed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from runner.config.units import format_bytes
from runner.errors import RunFailedError

__all__ = ["DriveFolder"]


class DriveFolder:
    """A folder on a drive.

    Args:
        path: the folder; it must be there as long as the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken = 0

    def memory(self, num_bytes: int) -> torch.UntypedStorage:
        """New memory in a file.

        Raises:
            RunFailedError: the folder is not there, or its drive is full.
        """
        try:
            handle, name = tempfile.mkstemp(prefix="runner-", suffix=".bytes", dir=self._path)
            try:
                os.posix_fallocate(handle, 0, max(1, num_bytes))
                made: Any = torch.UntypedStorage.from_file(name, shared=True, nbytes=num_bytes)
            finally:
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            size, held = format_bytes(num_bytes), format_bytes(self._taken)
            said = f"offload.drive={self._path}: no file of {size} could be made after {held}: {error.strerror}"
            raise RunFailedError(said) from error
        self._taken += num_bytes
        memory: torch.UntypedStorage = made
        return memory

    def require(self) -> None:
        """Check that the folder is still there, as it is not if its drive was removed.

        Raises:
            RunFailedError: it is not.
        """
        if not self._path.is_dir():
            raise RunFailedError(f"offload.drive={self._path}: the folder is gone; go on from the last checkpoint")
