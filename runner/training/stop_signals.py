"""Signals that ask a rank to stop: noted in the handler, acted on at a step's end, where all ranks agree.

A handler here does nothing but remember. Saving inside one would be a collective at whatever place each rank happens to
be: ranks that are not in lockstep would wait for one another for ever.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType

__all__ = ["StopSignals"]


class StopSignals:
    """A handler that remembers the first signal it got. :meth:`listen` installs one.

    Attributes:
        received: the number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._then: Callable[[], None] | None = None

    @classmethod
    def listen(cls, numbers: Iterable[int] = (signal.SIGUSR1, signal.SIGUSR2)) -> StopSignals:
        """Handle ``numbers`` from now on, SIGUSR1 among them; only in the main thread."""
        made = cls()
        for number in numbers:
            signal.signal(number, made)
        return made

    @classmethod
    def current(cls) -> StopSignals | None:
        """What this process listens with, if it does."""
        found = signal.getsignal(signal.SIGUSR1)
        return found if isinstance(found, cls) else None

    def pass_on(self, then: Callable[[], None]) -> None:
        """Call ``then`` at each signal, and now where one has come already; it must be safe in a handler."""
        self._then = then
        if self.received is not None:
            then()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._then is not None:
            self._then()
