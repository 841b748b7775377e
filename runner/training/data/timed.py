"""A data loader that measures how long its batches are waited for, and remembers their places in the data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from runner.training.data.places import Place

__all__ = ["TimedLoader"]

_PLACES = 32  # more than Lightning fetches ahead


class TimedLoader(DataLoader[Any]):
    """torch's loader; it adds up the seconds in which somebody waits for its next batch."""

    waited_seconds = 0.0
    _places: dict[int, Place] | None = None

    def note(self, place: Place) -> None:
        """Remember a place after a batch; older ones are forgotten."""
        self._places = self._places or {}
        self._places[place.step] = place
        if len(self._places) > _PLACES:
            del self._places[min(self._places)]

    def place_after(self, steps: int) -> Place | None:
        """The place after so many steps; None if the loader's dataset does not say its place."""
        return (self._places or {}).get(steps)

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
            batch = next(self._batches)
        finally:
            self._loader.waited_seconds += time.perf_counter() - start
        if batch.place is not None:
            self._loader.note(batch.place)
            batch.place = None
        return batch
