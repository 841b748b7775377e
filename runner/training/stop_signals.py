"""Signals that ask a rank to stop: the handler notes them, and all ranks stop together at the end of a step.

A handler here does nothing but remember. Saving inside a handler would be a collective at whatever place each rank is:
ranks that are not in lockstep would wait for one another for ever.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import ClassVar

__all__ = ["StopSignals"]


class StopSignals:
    """A handler that remembers the first signal it received. :meth:`listen` installs one.

    Args:
        before_training: called with a signal that comes before :meth:`pass_on`; by default it is only remembered.

    Attributes:
        received: the number of the first signal, or None.
    """

    _current: ClassVar[StopSignals | None] = None

    def __init__(self, before_training: Callable[[int], None] | None = None) -> None:
        self.received: int | None = None
        self._before_training = before_training
        self._then: Callable[[], None] | None = None

    @classmethod
    def listen(
        cls,
        numbers: Iterable[int] = (signal.SIGUSR1, signal.SIGUSR2),
        before_training: Callable[[int], None] | None = None,
    ) -> StopSignals:
        """Handle ``numbers`` from now to the end of this process; only in the main thread."""
        made = cls._current = cls(before_training)
        for number in numbers:
            signal.signal(number, made)
        return made

    @classmethod
    def current(cls) -> StopSignals | None:
        """The handler that this process has installed, or None."""
        return cls._current

    def pass_on(self, then: Callable[[], None]) -> None:
        """Call ``then`` at each signal, and now if a signal has come already; it must be safe in a handler."""
        self._then = then
        if self.received is not None:
            then()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._then is not None:
            self._then()
        elif self._before_training is not None:
            self._before_training(number)
