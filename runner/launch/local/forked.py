"""Ranks that are forked from a template process: started and adopted here, forked in
:mod:`runner.launch.local.template`.

Imports take nearly all the time that a rank needs to start, some seconds. The *template* is a process that imports once
for all ranks: it imports while this process still plans, waits for its orders, takes the ranks' environment from them,
forks every rank and ends at once. The orphaned ranks become children of this process, which has made itself their
reaper (PR_SET_CHILD_SUBREAPER). It waits for them, signals them, and they die with it, as if it had executed each of
them.

A rank reports over one pipe that it exists, and begins when it receives a byte over another pipe. By then this process
knows all ranks and is their parent. If this process dies before, the pipe is closed and the rank ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from types import TracebackType
from typing import Any, Self

from runner.launch.processes.stops import name_of_signal
from runner.launch.processes.supervise import POLL_SECONDS, ProcessSpec, end, reap, start
from runner.pulse import PollClock

__all__ = ["Forked", "Spare", "Template"]

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 4096  # bytes per read; a rank's report is shorter, so a pipe transfers it as a whole


@dataclass
class Forked:
    """A child of this process that another process has forked; used like :class:`subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        """The exit status, after waiting for the process to end."""
        return self._status(0)

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Template:
    """A template process that has been started. It ends with this context manager, or with :meth:`fork`.

    Args:
        spec: its command without the last three words. They are added here: the descriptor of a socket for the orders
            and
            the descriptors of two pipes.
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
        self,
        orders: Mapping[str, Any],
        handed: Sequence[int],
        count: int,
        is_told_to_stop: Callable[[], bool],
        limit_seconds: float = math.inf,
    ) -> Sequence[Forked]:
        """Have the template fork ``count`` ranks; empty if it ended early or this process was told to stop.

        Args:
            orders: what the template is told, as values that JSON can hold.
            handed: descriptors that the template receives.
            is_told_to_stop: asked repeatedly while the template imports.
            limit_seconds: the longest wait for the template.
        """
        with self:
            if not _adopt_orphans(True):
                return ()
            try:
                return self._fork(orders, handed, count, is_told_to_stop, limit_seconds)
            finally:
                _adopt_orphans(False)

    def _fork(
        self,
        orders: Mapping[str, Any],
        handed: Sequence[int],
        count: int,
        is_told_to_stop: Callable[[], bool],
        limit_seconds: float,
    ) -> Sequence[Forked]:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died
                socket.send_fds(self._orders, [json.dumps(orders).encode()], list(handed))
                self._orders.shutdown(socket.SHUT_WR)
            ranks = _listen(self._told, is_told_to_stop, limit_seconds)
        finally:
            self.end()
        if len(ranks) == count:
            with contextlib.suppress(BrokenPipeError):  # all were killed meanwhile
                self._go.write(bytes(count))
            return ranks
        self._go.close()
        reap(ranks)  # they found the pipe closed and end by themselves
        if self._process.returncode and not is_told_to_stop():
            code = self._process.returncode
            how = name_of_signal(-code) if code < 0 else f"status {code}"
            logger.warning("the process that imports for all ranks ended with %s: each imports by itself", how)
        return ()

    def end(self) -> None:
        """End the template at once, if it has not ended."""
        if self._process.returncode is None:  # after a wait, its process number may belong to another process
            end([self._process], signal.SIGKILL)
            reap([self._process])


class Spare:
    """A template for the next start of the ranks: it imports while they take their steps, and waits for their failure.

    A start takes mostly imports, so that a run with a spare goes on in seconds. It holds the memory of what it has
    imported. Use it as a context manager, which ends a template that nobody took.
    """

    def __init__(self) -> None:
        self._template: Template | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        template = self.take()
        if template is not None:
            with template:
                pass

    def keep(self, make: Callable[[], Template]) -> None:
        """Start the template that ``make`` makes, unless there is one."""
        if self._template is None:
            self._template = make()

    def take(self) -> Template | None:
        """The template, which now belongs to the caller; None if there is none."""
        template, self._template = self._template, None
        return template


def _adopt_orphans(adopt: bool) -> bool:
    """Switch whether orphaned descendants become children of this process; False if the kernel refuses."""
    return not ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _listen(told: FileIO, is_told_to_stop: Callable[[], bool], limit_seconds: float) -> list[Forked]:
    """The ranks that report, in the order of ranks, until the pipe is closed, or this process is told to stop, or the
    longest wait is over.
    """
    said, clock = b"", PollClock()
    while not is_told_to_stop() and clock.tick() < limit_seconds:
        if select.select([told], [], [], POLL_SECONDS)[0]:
            more = told.read(_MOST_BYTES)
            if not more:
                break
            said += more
    lines = sorted(tuple(map(int, line.split())) for line in said.splitlines())
    return [Forked(pid) for _, pid in lines]
