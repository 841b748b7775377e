"""Processes that a template of them forks: started and adopted here, made in :mod:`runner.launch.local.template`.

Imports are nearly all that the start of a rank costs, and take seconds. The *template* pays them once: it is executed,
imports while this process still plans, waits for its orders, takes from them the environment that ranks get, forks
every rank and ends at once. Its orphans become children of this process, which has made itself their reaper
(PR_SET_CHILD_SUBREAPER): it waits for them, signals them, and takes them along when it dies, as if it had executed each
of them.

A rank says that it is there over one pipe, and begins when a byte comes over another: by then this process knows all of
them, and is their parent. Where it dies instead, the pipe ends, and so does the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from types import TracebackType
from typing import Any, Self

from runner.launch.local.supervise import POLL_SECONDS, ProcessSpec, end, name_of_signal, start

__all__ = ["Forked", "Template"]

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


class Template:
    """A template that has been started. Its end is this object's, as a context manager, or that of :meth:`fork`.

    Args:
        spec: its command lacks the last three words, which are said here: the descriptors of a socket that the orders
            come by, and of the two pipes.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._orders, orders = socket.socketpair()
        told, tell = os.pipe()
        gate, go = os.pipe()
        self._told, self._go = FileIO(told, "r"), FileIO(go, "w")
        handed = (orders.fileno(), tell, gate)
        try:
            command = [*spec.command, *map(str, handed)]
            self._process = start(replace(spec, command=command, pass_fds=(*spec.pass_fds, *handed)))
        finally:
            orders.close()
            os.close(tell)
            os.close(gate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
        for each in (self._orders, self._told, self._go):
            each.close()

    def fork(
        self, orders: Mapping[str, Any], store_fd: int, count: int, is_told_to_stop: Callable[[], bool]
    ) -> Sequence[Forked]:
        """Have it fork ``count`` ranks; none where it ended before it had, or was ended to stop.

        Args:
            orders: what it is told, as JSON.
            store_fd: a descriptor that it is handed.
            is_told_to_stop: asked while it imports.
        """
        with self:
            if not _adopt_orphans(True):
                return ()
            try:
                return self._fork(orders, store_fd, count, is_told_to_stop)
            finally:
                _adopt_orphans(False)

    def _fork(
        self, orders: Mapping[str, Any], store_fd: int, count: int, is_told_to_stop: Callable[[], bool]
    ) -> Sequence[Forked]:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died
                socket.send_fds(self._orders, [json.dumps(orders).encode()], [store_fd])
                self._orders.shutdown(socket.SHUT_WR)
            ranks = _listen(self._told, is_told_to_stop)
        finally:
            self.end()
        if len(ranks) == count:
            with contextlib.suppress(BrokenPipeError):  # all were killed meanwhile
                self._go.write(bytes(count))
            return ranks
        self._go.close()
        for rank in ranks:  # they have found the gate closed
            rank.wait()
        if self._process.returncode and not is_told_to_stop():
            code = self._process.returncode
            how = name_of_signal(-code) if code < 0 else f"status {code}"
            logger.warning("the process that imports for all ranks ended with %s: each imports by itself", how)
        return ()

    def end(self) -> None:
        """End it at once, if it has not ended."""
        if self._process.returncode is None:  # once waited for, its number may be another's
            end([self._process], signal.SIGKILL)
            self._process.wait()


def _adopt_orphans(adopt: bool) -> bool:
    """Whether descendants whose parent ends become children of this process from now on; false where it is refused."""
    return not ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


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
