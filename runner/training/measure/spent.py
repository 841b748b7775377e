"""What the time of a run goes to, each second once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

__all__ = ["REHEARSAL", "REPORT", "SAVING", "STEPS", "Spent"]

_START, REHEARSAL, STEPS, _VALIDATION, SAVING, REPORT = "start", "rehearsal", "steps", "validation", "saving", "report"


class Spent(Callback):
    """Adds up the seconds of a rank by what it does; it is always in one part.

    Place it before callbacks that save after a validation.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._part = _START
        self._since = now()
        self._seconds: dict[str, float] = {}

    def enter(self, part: str) -> str:
        """Begin a part, and return the one before."""
        now, before = self._now(), self._part
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._part, self._since = part, now
        return before

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Be in a part while the block runs, and then in the one before again."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """The seconds so far of all parts that have begun after the start, which the process alone cannot know."""
        self.enter(self._part)
        return {part: seconds for part, seconds in self._seconds.items() if part != _START}

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter(_VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.enter(STEPS)
