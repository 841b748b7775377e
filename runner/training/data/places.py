"""The place of a run in an iterable dataset that can say and load its own state.

A dataset, or else the iterator that it makes, has ``state_dict()`` and ``load_state_dict(state)``, as datasets of
Hugging Face and those for torchdata's StatefulDataLoader do: the state counts for the next iteration. Every batch
carries the place after it, because a loader reads ahead of the step that is saved. With it goes a checksum of the
sample that follows: a state that does not bring that sample back is not used, and the samples are read again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

__all__ = ["Place", "has_state"]


@dataclass(frozen=True)
class Place:
    """A place between two samples of an iterable dataset.

    Args:
        step: training steps before it, from the beginning of the run.
        epoch: the epoch of the sample before it.
        number: samples of this epoch before it.
        of_iterator: whether the state is that of the dataset's iterator, and not of the dataset.
        state: the state, made of tensors and plain values.
        following: the checksum of the sample after it; None at the end of an epoch.
    """

    step: int
    epoch: int
    number: int
    of_iterator: bool
    state: Any
    following: int | None = None

    @classmethod
    def after(cls, dataset: Any, iterator: Iterator[Any], step: int, epoch: int, number: int) -> Place | None:
        """The place where the iterator of a dataset is; None if a checkpoint cannot hold the state.

        The iterator's own state goes before the dataset's, as in torchdata.
        """
        of_iterator = has_state(iterator)
        owner: Any = iterator if of_iterator else dataset
        state = copy.deepcopy(owner.state_dict())
        return cls(step, epoch, number, of_iterator, state) if _is_plain(state) else None

    def open(self, dataset: Any) -> Iterator[Any]:
        """An iterator of the samples after this place."""
        state = copy.deepcopy(self.state)
        if not self.of_iterator:
            dataset.load_state_dict(state)
        iterator: Any = iter(dataset)
        if self.of_iterator:
            iterator.load_state_dict(state)
        found: Iterator[Any] = iterator
        return found

    def to_entry(self) -> dict[str, Any]:
        """The entry of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Place:
        """The inverse of :meth:`to_entry`."""
        return cls(**entry)


def has_state(owner: Any) -> bool:
    """Whether a dataset or an iterator has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold the value: tensors, plain values, and containers of them."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) in (str, int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or type(value) is Tensor
