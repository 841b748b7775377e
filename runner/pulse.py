"""The pulse of a rank: how far it is, in memory that it shares with the process that supervises it.

The supervisor can read it whatever the rank does: while native code holds the interpreter's lock, while the disk is
full, while the rank hangs on its way out. Each rank writes into a slot of its own and may read those of others. Behind
the slots, the system's handler of :data:`STACKS_SIGNAL` writes the stacks of a rank, also without the interpreter.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import ClassVar

__all__ = [
    "MOST_SECONDS_PER_POLL",
    "NO_PROGRESS",
    "PULSES_VARIABLE",
    "STACKS_SIGNAL",
    "Phase",
    "PollClock",
    "Pulse",
    "Pulses",
]

PULSES_VARIABLE = "RUNNER_PULSES_FD"
"""The environment variable that names the descriptor of the shared memory in a rank."""
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", None)
"""The signal at which a rank writes its stacks; None on a system without it."""

NO_PROGRESS = "no progress for"
"""The first words of what a rank leaves when it ends itself because nothing happens."""

MOST_SECONDS_PER_POLL = 1.0
"""What one poll counts at most: while this process was stopped, or its machine slept, it could see no progress."""
_SLOT_BYTES = 1024
_HEAD = struct.Struct("=QQH")  # phase, beats, bytes of the text
_PHASE, _BEATS, _LENGTH = 0, 8, 16  # where they lie in a slot; each is written alone


class PollClock:
    """Seconds as this process has seen them pass, poll by poll. It stands still while the process or machine does."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self) -> float:
        """Count the time since the last call, at most :data:`MOST_SECONDS_PER_POLL`, and return the time."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, MOST_SECONDS_PER_POLL)
        return self.now


class Phase(IntEnum):
    """What a rank does. A new slot says START."""

    START = 0  # until it is ready for its first step
    STEP = 1  # steps and validations
    SAVE = 2  # what all ranks do together outside of steps, e.g. writing a checkpoint
    EXIT = 3  # what follows the last step: the record, weights, the user's report
    DONE = 4  # its work is complete; only the end of the process is left


class Pulse:
    """The slot of this process, or memory that nobody reads if it is not supervised.

    Args:
        memory: the slots of all ranks.
        rank: the number of the own slot.
    """

    _current: ClassVar[Pulse | None] = None

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    @classmethod
    def current(cls) -> Pulse:
        """The pulse of this process."""
        if cls._current is None:
            cls._current = cls._of_environment()
        return cls._current

    @classmethod
    def _of_environment(cls) -> Pulse:
        found = os.environ.get(PULSES_VARIABLE)
        if found is None:
            return cls(mmap.mmap(-1, _SLOT_BYTES), 0)
        rank = int(os.environ["RANK"])
        ranks = int(os.environ.get("WORLD_SIZE", rank + 1))
        return cls(mmap.mmap(int(found), _SLOT_BYTES * ranks), rank)

    @classmethod
    def begin(cls) -> None:
        """Make this process, which a supervisor has started as a rank, answer :data:`STACKS_SIGNAL`."""
        cls._current = None  # a forked process has its template's
        if STACKS_SIGNAL is not None and PULSES_VARIABLE in os.environ:
            signal.signal(STACKS_SIGNAL, _write_stacks)
            _answer_without_interpreter()

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase, and return the one before."""
        before = Phase(_HEAD.unpack_from(self._memory, self._start)[0])
        struct.pack_into("=Q", self._memory, self._start + _PHASE, phase)
        _answer_without_interpreter()
        return before

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Be in a phase while the block runs, and then in the one before again."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self, count: int) -> None:
        """Say how much has been done in this phase; any other number than before means progress."""
        struct.pack_into("=Q", self._memory, self._start + _BEATS, count)

    def say(self, text: str) -> None:
        """Leave a text, cut to what the slot holds."""
        said = text.encode()[: _SLOT_BYTES - _HEAD.size]
        self._memory[self._start + _HEAD.size : self._start + _HEAD.size + len(said)] = said
        struct.pack_into("=H", self._memory, self._start + _LENGTH, len(said))

    def said_by(self, rank: int) -> str:
        """The text of a rank; empty if there is none, or if this process cannot know."""
        return _text(self._memory, rank) if rank * _SLOT_BYTES < len(self._memory) else ""

    @property
    def _start(self) -> int:
        return self._rank * _SLOT_BYTES


class Pulses:
    """The memory of all ranks, in the process that supervises them. It has no name in any folder."""

    def __init__(self, count: int) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("pulses")
        else:
            self._descriptor, name = tempfile.mkstemp()
            os.unlink(name)
        os.ftruncate(self._descriptor, count * _SLOT_BYTES)
        os.lseek(self._descriptor, 0, os.SEEK_END)  # stacks are written behind the slots
        self._memory = mmap.mmap(self._descriptor, count * _SLOT_BYTES)
        self._read = len(self._memory)  # bytes of the file that have been read, or are slots

    def fileno(self) -> int:
        return self._descriptor

    def of(self, rank: int) -> tuple[Phase, int]:
        """Return phase and beats of a rank."""
        phase, beats, _ = _HEAD.unpack_from(self._memory, rank * _SLOT_BYTES)
        return Phase(phase), beats

    def said_by(self, rank: int) -> str:
        """The text of a rank; empty if there is none."""
        return _text(self._memory, rank)

    def stacks(self) -> str:
        """What has been written behind the slots since the last call."""
        start = self._read
        self._read = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, self._read - start, start).decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)


def _answer_without_interpreter() -> None:
    """Let the system's handler answer the signal, where the process answers it at all.

    Lightning's trainer sets all signals back, when it ends, to the handlers that Python knows.
    """
    if STACKS_SIGNAL is not None and PULSES_VARIABLE in os.environ and signal.getsignal(STACKS_SIGNAL) is _write_stacks:
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.register(STACKS_SIGNAL, file=int(os.environ[PULSES_VARIABLE]), all_threads=True)


def _write_stacks(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=int(os.environ[PULSES_VARIABLE]), all_threads=True)


def _text(memory: mmap.mmap, rank: int) -> str:
    start = rank * _SLOT_BYTES
    length = _HEAD.unpack_from(memory, start)[2]
    return memory[start + _HEAD.size : start + _HEAD.size + length].decode(errors="replace")
