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
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from runner.errors import EXIT_OK
from runner.launch.processes.overdue import Overdue, Watch
from runner.launch.processes.stops import StopRequests
from runner.parent import end_with
from runner.pulse import PollClock

__all__ = [
    "PLAIN_ENDINGS",
    "POLL_SECONDS",
    "Ending",
    "Endings",
    "Process",
    "ProcessSpec",
    "die_with_parent",
    "end",
    "reap",
    "start",
    "supervise",
]

logger = logging.getLogger(__name__)

PARENT_VARIABLE = "RUNNER_PARENT_PID"
POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.5  # after a first failure: time for the others to report how it affected them
FAILURE_GRACE_SECONDS = 2.0  # SIGTERM to SIGKILL after a failure: the others only wait for a dead peer
UNKILLABLE_SECONDS = 10.0  # SIGKILL to giving up: a process in uninterruptible sleep ends when its device answers

_STANDARD_ERROR = 2


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
        interrupted_by: the signal that told the parent or one of the processes to stop, or None.
        overdue: the failed ones that were ended here because they made no progress, with the reason.
    """

    returncodes: tuple[int, ...]
    failed: tuple[int, ...]
    interrupted_by: int | None
    overdue: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endings:
    """What the exit statuses of processes mean; any other status is a failure.

    Args:
        done: the status of a process whose work is complete.
        stopped: the status of a process that was told to stop, as all others were, and has saved its work; None if
            processes of this kind have no such status.
        killed_is_stopped: whether a process that SIGTERM ended was told to stop, before it had any work to save. The
            others then end, too, because they would wait for it.
    """

    done: int
    stopped: int | None = None
    killed_is_stopped: bool = False

    def means_failure(self, code: int) -> bool:
        return code not in (self.done, self.stopped) and not self.means_killed(code)

    def means_killed(self, code: int | None) -> bool:
        return self.killed_is_stopped and code == -signal.SIGTERM


PLAIN_ENDINGS = Endings(EXIT_OK)
"""0 is success, as everywhere."""


def supervise(
    specs: Sequence[ProcessSpec],
    *,
    start_together: Callable[[Callable[[], bool]], Sequence[Process]] | None = None,
    after_start: Callable[[], None] | None = None,
    endings: Endings = PLAIN_ENDINGS,
    grace_seconds: Callable[[], float],
    watch: Watch | None = None,
    each_poll: Callable[[], None] | None = None,
) -> Ending:
    """Start the processes, wait until all have ended, and end the others as soon as one fails.

    SIGINT, SIGHUP, SIGTERM, SIGUSR1 and SIGUSR2 to this process end all of them, except those that it was started to
    ignore, as ``nohup`` does. They have ``grace_seconds`` for it. Further signals change nothing, because a scheduler
    sends several (SIGUSR1 some time ahead, then SIGTERM), except that a second SIGINT, the user's second Ctrl-C, ends
    all at once. Once the group has ended, signals are ignored (:func:`end_undisturbed`).

    Args:
        specs: the processes to start, at least one.
        start_together: a function that starts either all processes at once or none. Its argument is a function that
            tells whether this process has been told to stop. If it starts none, the processes are executed one by one.
        after_start: called when all have been started, e.g. to close what they inherited.
        endings: what the processes' exit statuses mean.
        grace_seconds: called when this process is told to stop: the time from SIGTERM to SIGKILL.
        watch: says which processes make no progress. They are ended, and have failed unless their work was complete.
        each_poll: called again and again while the processes run.
    """
    with StopRequests.listening() as stop:
        processes: list[Process] = []
        try:
            if start_together is not None:
                processes += start_together(lambda: stop.is_told)
            for spec in specs if not processes and not stop.is_told else ():
                processes.append(start(spec))
            if after_start is not None:
                after_start()
            failed, overdue = _wait(processes, stop, endings, grace_seconds, watch, each_poll)
        finally:
            end(processes, signal.SIGKILL)
            reap(processes)
        codes = tuple(-signal.SIGKILL if process.returncode is None else process.returncode for process in processes)
        return Ending(codes, failed, stop.signal or _signal_to_one(codes, endings), overdue)


def die_with_parent() -> None:
    """Make this process end when its parent does, or at once if the parent has ended. Call it first."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent:
        end_with(parent)


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


def reap(processes: Sequence[Process]) -> None:
    """Wait until processes that were killed have ended; one that the kernel cannot end now is left behind."""
    clock = PollClock()
    while any(process.poll() is None for process in processes):
        if clock.tick() >= UNKILLABLE_SECONDS:
            left = ", ".join(str(process.pid) for process in processes if process.returncode is None)
            logger.warning("process %s is in uninterruptible sleep and ends when its device answers", left)
            return
        time.sleep(POLL_SECONDS)


def _wait(
    processes: Sequence[Process],
    stop: StopRequests,
    endings: Endings,
    grace_seconds: Callable[[], float],
    watch: Watch | None,
    each_poll: Callable[[], None] | None,
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Wait until all have ended or must be killed. Those that were overdue have been killed, and may not end.

    Returns:
        the indices of those that failed by themselves or were overdue, and why the latter were.
    """
    failed: list[int] = []
    overdue: dict[int, Overdue] = {}
    settled_at: float | None = None  # the time from which on the others are told to end
    kill_at: float | None = None
    clock = PollClock()
    while any(process.poll() is None for index, process in enumerate(processes) if index not in overdue):
        now = clock.tick()
        told = stop.is_told or any(endings.means_killed(process.poll()) for process in processes)
        if kill_at is None and (told or (settled_at is not None and now >= settled_at)):
            if not told:
                overdue |= _end_silent(processes, watch, failed)
            end([process for process in processes if process.poll() is None], signal.SIGTERM)
            kill_at = now + (grace_seconds() if told else FAILURE_GRACE_SECONDS)
        if kill_at is not None and (now >= kill_at or stop.interrupts > 1):
            break
        if kill_at is None:
            if each_poll is not None:
                each_poll()
            overdue |= _end_overdue(processes, watch, now, overdue.keys())
            _note_failures(processes, failed, endings, overdue)
            if failed and settled_at is None:
                settled_at = now + SETTLE_SECONDS
        time.sleep(POLL_SECONDS)
    if kill_at is None:
        _note_failures(processes, failed, endings, overdue)
    return tuple(failed), {index: overdue[index].reason for index in failed if index in overdue}


def _end_overdue(
    processes: Sequence[Process], watch: Watch | None, now: float, ended: Collection[int]
) -> dict[int, Overdue]:
    """End the processes that are overdue and not ``ended`` yet; return what is to be told of each."""
    if watch is None:
        return {}
    alive = [index for index, process in enumerate(processes) if process.poll() is None and index not in ended]
    judged = {index: watch.judged(index, processes[index].pid) for index in watch.overdue(alive, now)}
    end([processes[index] for index in judged], signal.SIGKILL)
    for index, each in judged.items():
        if each.is_done:
            logger.warning("process %d was ended, and nothing is lost: %s", processes[index].pid, each.reason)
    return judged


def _end_silent(processes: Sequence[Process], watch: Watch | None, failed: list[int]) -> dict[int, Overdue]:
    """End the processes for which one of the ``failed`` ones has waited, and add them there; what is to be told."""
    alive = [index for index, process in enumerate(processes) if process.poll() is None]
    silent = watch.silent(alive, failed) if watch is not None else []
    judged = {index: watch.judged_silent(processes[index].pid) for index in silent if watch is not None}
    end([processes[index] for index in judged], signal.SIGKILL)
    failed += judged
    return judged


def _note_failures(
    processes: Sequence[Process], failed: list[int], endings: Endings, overdue: Mapping[int, Overdue]
) -> None:
    for index, process in enumerate(processes):
        code, late = process.poll(), overdue.get(index)
        has_failed = not late.is_done if late is not None else code is not None and endings.means_failure(code)
        if has_failed and index not in failed:
            failed.append(index)


def _signal_to_one(codes: Sequence[int], endings: Endings) -> int | None:
    """SIGTERM if a process, and not this one, was told to stop; the other signals of schedulers they ignore."""
    told = any(code == endings.stopped or endings.means_killed(code) for code in codes)
    return signal.SIGTERM if told else None


def end(processes: Sequence[Process], number: signal.Signals) -> None:
    """Signal the whole process group of each, because a process that has ended may have left children behind."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
