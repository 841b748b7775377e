"""A data loader that measures how long its batches are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["TimedLoader"]


class TimedLoader(DataLoader[Any]):
    """torch's loader; it adds up the seconds in which somebody waits for its next batch."""

    waited_seconds = 0.0

    def __iter__(self) -> Any:
        return _Timed(self, super().__iter__())

    def take_seconds(self) -> float:
        """The seconds since the last call."""
        taken, self.waited_seconds = self.waited_seconds, 0.0
        return taken


class _Timed:
    def __init__(self, loader: TimedLoader, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self._loader.waited_seconds += time.perf_counter() - start
