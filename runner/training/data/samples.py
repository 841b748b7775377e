"""The samples of an iterable dataset, epoch after epoch, each drawn under random generators of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from runner.errors import RunFailedError
from runner.model.seeds import seeded
from runner.training.data.places import Place, has_state

__all__ = ["Checksum", "Samples", "why_not_at"]

Checksum = Callable[[Any], int]
"""A number for a sample."""


class Samples:
    """One reading of a dataset, from its beginning or from a place.

    Args:
        dataset: iterable more than once; if it has ``set_epoch``, it is told the epoch.
        seed: seeds the random generators of a sample, together with the epoch and the sample's position in it.
        endless: whether to start again when the dataset ends.
        place: where to begin; None: at the first sample.
    """

    def __init__(self, dataset: Any, seed: int, *, endless: bool, place: Place | None = None) -> None:
        self._dataset, self._seed, self._endless = dataset, seed, endless
        self._epoch, self._number = (place.epoch, place.number) if place is not None else (0, 0)
        self._ahead: list[Any] = []  # a sample that has been read and not been taken
        self._iterator = self._open(place)

    def take(self, count: int) -> list[Any]:
        """The next samples of one epoch: at most ``count``, and none if the data has ended.

        Raises:
            RunFailedError: a whole epoch has no sample.
        """
        while not (found := list(islice(self._of_epoch(), count))):
            if not self._number:
                raise RunFailedError(
                    f"the iterable dataset gave no sample in its epoch {self._epoch}: it must give its samples anew "
                    "each time it is iterated"
                )
            if not self._endless:
                break
            self._epoch, self._number = self._epoch + 1, 0
            self._iterator = self._open(None)
        return found

    def place(self, step: int, checksum: Checksum) -> Place | None:
        """The place before the next sample, after ``step`` steps; None if the dataset cannot say it.

        One sample is read ahead, so that the place tells what must follow it.
        """
        if not (has_state(self._iterator) or has_state(self._dataset)):
            return None
        place = Place.after(self._dataset, self._iterator, step, self._epoch, self._number)
        return replace(place, following=self.following(checksum)) if place is not None else None

    def following(self, checksum: Checksum) -> int | None:
        """The checksum of the next sample of this epoch, which is still to be taken; None after the last one."""
        self._ahead = self._ahead or list(islice(self._read(), 1))
        return checksum(self._ahead[0]) if self._ahead else None

    def _open(self, place: Place | None) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        with seeded(self._seed, self._epoch, "order"):  # the dataset may shuffle before its first sample
            if callable(set_epoch):
                set_epoch(self._epoch)
            return iter(self._dataset) if place is None else place.open(self._dataset)

    def _of_epoch(self) -> Iterator[Any]:
        while found := self._ahead or list(islice(self._read(), 1)):
            self._ahead = []
            self._number += 1
            yield found[0]

    def _read(self) -> Iterator[Any]:
        with seeded(self._seed, self._epoch, self._number):
            try:
                sample = next(self._iterator)
            except StopIteration:
                return
        yield sample


def why_not_at(place: Place, dataset: Any, seed: int, checksum: Checksum) -> str:
    """Why a dataset cannot go on at a place; empty if it can. A copy is tried, so that the dataset stays as it is.

    A buffer in which samples are shuffled is what a state often lacks.

    Args:
        seed: see :class:`Samples`.
    """
    try:
        found = Samples(copy.deepcopy(dataset), seed, endless=True, place=place).following(checksum)
    except Exception as error:  # of a user's code
        return f"its load_state_dict raised {type(error).__name__}: {error}"
    return "" if found == place.following else "its load_state_dict does not give the sample that followed"
