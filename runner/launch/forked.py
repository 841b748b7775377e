"""Processes that a template of them forks: started and adopted here, made in :mod:`runner.launch.template`.

Imports are nearly all that the start of a rank costs, and take seconds. The *template* pays them once: it is executed
with the environment that ranks get, imports, forks every rank and ends at once. Its orphans become children of this
process, which has made itself their reaper (PR_SET_CHILD_SUBREAPER): it waits for them, signals them, and takes them
along when it dies, as if it had executed each of them.

A rank says that it is there over one pipe, and begins when a byte comes over another: by then this process knows all of
them, and is their parent. Where it dies instead, the pipe ends, and so does the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO

from runner.launch.supervise import POLL_SECONDS, ProcessSpec, end, name_of_signal, start

__all__ = ["Forked", "fork_from"]

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 4096  # of a read; what a rank says is shorter, so that the pipe takes it whole


@dataclass
class Forked:
    """A child of this process that another one has forked; as :class:`subprocess.Popen` otherwise."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its status, or None while it runs."""
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        """Its status, when it has ended."""
        return self._status(0)

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_from(template: ProcessSpec, count: int, is_told_to_stop: Callable[[], bool]) -> Sequence[Forked]:
    """Start ``count`` ranks by the template; none where it ended before it had, or was ended to stop.

    Args:
        template: its command lacks the last three words, which are said here.
        is_told_to_stop: asked while the template imports.
    """
    if not _adopt_orphans(True):
        return ()
    try:
        return _fork_from(template, count, is_told_to_stop)
    finally:
        _adopt_orphans(False)


def _fork_from(template: ProcessSpec, count: int, is_told_to_stop: Callable[[], bool]) -> Sequence[Forked]:
    with _pipe() as (told, tell), _pipe() as (gate, go):
        command = [*template.command, str(count), str(tell.fileno()), str(gate.fileno())]
        process = start(replace(template, command=command, pass_fds=(*template.pass_fds, tell.fileno(), gate.fileno())))
        tell.close()
        gate.close()
        try:
            ranks = _listen(told, is_told_to_stop)
        finally:
            end([process], signal.SIGKILL)
            process.wait()
        if len(ranks) == count:
            with contextlib.suppress(BrokenPipeError):  # all were killed meanwhile
                go.write(bytes(count))
            return ranks
    for rank in ranks:  # they have found the gate closed
        rank.wait()
    if process.returncode and not is_told_to_stop():
        how = name_of_signal(-process.returncode) if process.returncode < 0 else f"status {process.returncode}"
        logger.warning("the process that imports for all ranks ended with %s: each imports by itself", how)
    return ()


def _adopt_orphans(adopt: bool) -> bool:
    """Whether descendants whose parent ends become children of this process from now on; false where it is refused."""
    return not ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Both ends; what is open of them in the end is closed."""
    read, write = os.pipe()
    with FileIO(read, "r") as out, FileIO(write, "w") as into:
        yield out, into


def _listen(told: FileIO, is_told_to_stop: Callable[[], bool]) -> list[Forked]:
    """Who says that it is there, in the order of ranks, until nobody is left to speak, or it is time to stop."""
    said = b""
    while not is_told_to_stop():
        if select.select([told], [], [], POLL_SECONDS)[0]:
            more = told.read(_MOST_BYTES)
            if not more:
                break
            said += more
    lines = sorted(tuple(map(int, line.split())) for line in said.splitlines())
    return [Forked(pid) for _, pid in lines]
