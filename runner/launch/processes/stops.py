"""The signals that ask a command to stop, what each means for its exit status, and who answers them when.

A scheduler that takes a machine away sends SIGTERM, SIGUSR1 or SIGUSR2: the run is then *preempted*, its exit status
says that it can continue, and a job is queued again. SIGINT and SIGHUP come from the user, who wants it to end. The
meaning does not depend on how far the run has come.

From its start on, a command answers a signal with a :class:`StoppedError` (:func:`listen_for_stops`). While ranks run,
the supervisor notes it instead (:class:`StopRequests`), and when they have ended nothing disturbs the command any more
(:func:`end_undisturbed`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from runner.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

__all__ = [
    "PREEMPTING_SIGNALS",
    "StopRequests",
    "StoppedError",
    "end_undisturbed",
    "exit_status_of",
    "ignore_preemption",
    "listen_for_stops",
    "name_of_signal",
    "signal_of",
]

PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which a scheduler asks a run to give up its machine; other signals come from the user."""
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, *PREEMPTING_SIGNALS)


class StoppedError(KeyboardInterrupt):
    """Raised in the main thread by a signal that asks this process to stop, as Ctrl-C raises its base class.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class StopRequests:
    """The signals that this process has received while it listened.

    Attributes:
        signal: the first of them, or None.
        interrupts: how many of them were the user's SIGINT.
    """

    signal: int | None = None
    interrupts: int = 0

    @property
    def is_told(self) -> bool:
        """Whether this process has been told to stop."""
        return self.signal is not None

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator[StopRequests]:
        """Within the block signals are noted, and disturb nothing; after it they are ignored if there was one."""
        stop = cls()
        previous = _handle(stop._note)
        try:
            yield stop
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if stop.is_told else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.interrupts += number == signal.SIGINT


def listen_for_stops() -> None:
    """From now on, a signal to stop raises :class:`StoppedError` in this process, which must belong to the command."""
    _handle(_stop)


def end_undisturbed() -> None:
    """Ignore further signals to end: only the record and the exit status are left to do, which takes a moment."""
    _handle(signal.SIG_IGN)


def ignore_preemption() -> None:
    """Leave SIGUSR1 and SIGUSR2 to the parent, because a scheduler sends them to every process of a job."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def signal_of(error: KeyboardInterrupt) -> int:
    """The signal that raised ``error``."""
    return error.number if isinstance(error, StoppedError) else signal.SIGINT


def exit_status_of(number: int) -> int:
    """The exit status of a command that a signal has stopped before its work was done."""
    return EXIT_PREEMPTED if number in PREEMPTING_SIGNALS else EXIT_INTERRUPTED


def name_of_signal(number: int) -> str:
    """The name of a signal, e.g. ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _handle(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> dict[int, Any]:
    """Set the handler of all signals to stop and return those before. Only the main thread may; else it does nothing.

    A signal that is ignored, as nohup asks for SIGHUP, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError(number)
