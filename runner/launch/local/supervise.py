"""Processes that start and end together and never outlive their parent.

torch's elastic agent is not used for this. When one worker has failed, it gives the others a fixed 30 s between SIGTERM
and SIGKILL (``SubprocessContext._poll`` calls ``close()`` with its default, whatever ``shutdown_timeout`` says), and a
rank that waits inside a collective with a Python handler for SIGTERM uses all of them. It also needs torch in the
parent.

Each process leads a session of its own. A terminal's Ctrl-C therefore reaches only the parent, which ends the others in
order, and a process's own children (data loader workers) end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

__all__ = [
    "INTERRUPT_GRACE_SECONDS",
    "POLL_SECONDS",
    "PREEMPTING_SIGNALS",
    "Ending",
    "Process",
    "ProcessSpec",
    "die_with_parent",
    "end",
    "end_undisturbed",
    "ignore_preemption",
    "name_of_signal",
    "start",
    "supervise",
]

PARENT_VARIABLE = "RUNNER_PARENT_PID"
POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.5  # after a first failure: time for the others to report how it affected them
FAILURE_GRACE_SECONDS = 2.0  # SIGTERM to SIGKILL after a failure: the others only wait for a dead peer
INTERRUPT_GRACE_SECONDS = 10.0  # SIGTERM to SIGKILL at the user's request: time to reach the end of a step

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which a scheduler asks a run to give up its machine; other signals come from the user."""
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, *PREEMPTING_SIGNALS)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. Its standard output and error go to ``log``, or where the parent's go.

    Args:
        to_stderr: without ``log``, send both to the parent's standard error, because a program reads its standard
            output.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path | None = None
    pass_fds: tuple[int, ...] = ()
    to_stderr: bool = False


class Process(Protocol):
    """A child of this process, with the interface of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How the group ended. Lists are by process, in the order of the specs.

    Args:
        returncodes: exit statuses like those of :class:`subprocess.Popen`, negative for a signal; empty if no process
            was started.
        failed: indices of those that failed by themselves, in the order in which they were seen.
        interrupted_by: the signal that told the parent to stop, or None.
    """

    returncodes: tuple[int, ...]
    failed: tuple[int, ...]
    interrupted_by: int | None


def supervise(
    specs: Sequence[ProcessSpec],
    *,
    start_together: Callable[[Callable[[], bool]], Sequence[Process]] | None = None,
    after_start: Callable[[], None] | None = None,
    interrupt_grace_seconds: float = INTERRUPT_GRACE_SECONDS,
) -> Ending:
    """Start the processes, wait until all have ended, and end the others as soon as one fails.

    SIGINT, SIGHUP, SIGTERM, SIGUSR1 and SIGUSR2 to this process end all of them; a second signal ends them at once.
    After the first signal this process is ending too, so later signals are ignored once the group has ended
    (:func:`end_undisturbed`).

    Args:
        specs: the processes to start, at least one.
        start_together: a function that starts either all processes at once or none. Its argument is a function that
            tells whether this process has been told to stop. If it starts none, the processes are executed one by one.
        after_start: called when all have been started, e.g. to close what they inherited.
        interrupt_grace_seconds: time from SIGTERM to SIGKILL after this process was told to stop.
    """
    with _Stop.listening() as stop:
        processes: list[Process] = []
        try:
            if start_together is not None:
                processes += start_together(lambda: stop.count > 0)
            for spec in specs if not processes and not stop.count else ():
                processes.append(start(spec))
            if after_start is not None:
                after_start()
            failed = _wait(processes, stop, interrupt_grace_seconds)
        finally:
            end(processes, signal.SIGKILL)
            for process in processes:
                process.wait()
        return Ending(tuple(process.returncode or 0 for process in processes), failed, stop.signal)


def die_with_parent() -> None:
    """Make this process end when its parent does, or at once if the parent has ended. Call it first."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if not parent:
        return
    if hasattr(signal, "SIGKILL") and os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def end_undisturbed() -> None:
    """Ignore further signals to end: only the record and the exit status are left to do, which takes a moment."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def ignore_preemption() -> None:
    """Leave SIGUSR1 and SIGUSR2 to the parent, because a scheduler sends them to every process of a job."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def name_of_signal(number: int) -> str:
    """The name of a signal, e.g. ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class _Stop:
    """The signals that the parent has received."""

    signal: int | None = None
    count: int = 0

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[_Stop]:
        stop = cls()
        previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers here only
            for number in _ENDING_SIGNALS:
                previous[number] = signal.signal(number, stop._note)
        try:
            yield stop
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler if stop.signal is None else signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.count += 1


def start(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    """Execute a process, which may call :func:`die_with_parent`."""
    environment = {**os.environ, **spec.environment, PARENT_VARIABLE: str(os.getpid())}
    with contextlib.ExitStack() as files:
        output = files.enter_context(spec.log.open("ab")) if spec.log is not None else None
        return subprocess.Popen(
            list(spec.command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=_STANDARD_ERROR if output is None and spec.to_stderr else output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
            pass_fds=spec.pass_fds,
        )


def _wait(processes: Sequence[Process], stop: _Stop, grace_seconds: float) -> tuple[int, ...]:
    """Wait until all have ended or must be killed; return the indices of those that failed by themselves."""
    failed: list[int] = []
    settled_at: float | None = None  # the time from which on the others are told to end
    kill_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if kill_at is None and (stop.count or (settled_at is not None and now >= settled_at)):
            end([process for process in processes if process.poll() is None], signal.SIGTERM)
            kill_at = now + (grace_seconds if stop.count else FAILURE_GRACE_SECONDS)
        if kill_at is not None and (now >= kill_at or stop.count > 1):
            break
        if kill_at is None:
            _note_failures(processes, failed)
            if failed and settled_at is None:
                settled_at = now + SETTLE_SECONDS
        time.sleep(POLL_SECONDS)
    if kill_at is None:
        _note_failures(processes, failed)
    return tuple(failed)


def _note_failures(processes: Sequence[Process], failed: list[int]) -> None:
    for index, process in enumerate(processes):
        if process.poll() not in (None, 0) and index not in failed:
            failed.append(index)


def end(processes: Sequence[Process], number: signal.Signals) -> None:
    """Signal the whole process group of each, because a process that has ended may have left children behind."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _watch_parent(parent: int) -> None:
    """Look twice a second whether the parent lives, for systems whose kernel sends no signal for it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
