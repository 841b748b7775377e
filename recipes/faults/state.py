"""What the processes of a run and the campaign tell each other about faults: a small file that all of them map.

What is written there survives the death of who wrote it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

__all__ = ["State"]

_BYTES = 4096
_HAPPENED, _RELEASED, _ERRNO, _SAVED, _PIDS = 0, 8, 16, 64, 1024
_MOST_RANKS = 64
_POLL_SECONDS = 0.01


class State:
    """A view of the file; every attribute is a number that starts at 0.

    Attributes:
        happened: how many faults of the list have been injected. It is counted before the fault, which may leave no
            time for it afterwards.
        released: up to which fault a process that waits for the campaign may go on.
        errno: the error that every file call gets from now on, e.g. of a disk that stays full.
    """

    happened = property(lambda self: self._get(_HAPPENED), lambda self, value: self._set(_HAPPENED, value))
    released = property(lambda self: self._get(_RELEASED), lambda self, value: self._set(_RELEASED, value))
    errno = property(lambda self: self._get(_ERRNO), lambda self, value: self._set(_ERRNO, value))

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _BYTES)
            self._memory = mmap.mmap(handle, _BYTES)
        finally:
            os.close(handle)

    def happens(self, number: int) -> None:
        """The fault of this number, from 1, is injected in this process, now."""
        self._set(_PIDS + 8 * number, os.getpid())
        self.happened = number

    def process_of(self, number: int) -> int:
        """The process in which a fault was injected."""
        return self._get(_PIDS + 8 * number)

    def wait_for_release(self, number: int) -> None:
        """Wait until the campaign has done its part of a fault."""
        while self.released < number:
            time.sleep(_POLL_SECONDS)

    def acknowledge(self, rank: int, step: int) -> None:
        """Note that the save after a step has been reported as complete by a rank."""
        self._set(_SAVED + 8 * rank, step)

    def acknowledged(self, ranks: int) -> int:
        """The newest step whose save all ranks have reported."""
        return min(self._get(_SAVED + 8 * rank) for rank in range(ranks))

    def forget(self, step: int) -> None:
        """Let no save after this step count: it was taken away, as a part of a fault."""
        for rank in range(_MOST_RANKS):
            self.acknowledge(rank, min(step, self._get(_SAVED + 8 * rank)))

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("=q", self._memory, place)[0])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("=q", self._memory, place, value)
