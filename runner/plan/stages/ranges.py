"""Sums and maxima over ranges of a list, each in constant time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Generic, TypeVar

__all__ = ["RangeMaximum", "prefix"]

T = TypeVar("T")

_SCANS = 2  # ranges that are read through before there is a table: a program of a single stage asks for no more


def prefix(values: Iterable[int]) -> list[int]:
    """The prefix sums of ``values``: ``result[j] - result[i]`` is the sum of the values from i to j - 1."""
    return list(accumulate(values, initial=0))


class RangeMaximum(Generic[T]):
    """Gives the largest value of any range; after some, from a table of the maxima of all ranges of length 2**k.

    Args:
        values: the list.
        larger: gives the larger of two values, or what takes the place of both; that of equal values must be the same.
    """

    def __init__(self, values: Sequence[T], larger: Callable[[T, T], T] = max) -> None:  # type: ignore[assignment]
        self._levels, self._larger = [list(values)], larger
        self._scans = _SCANS

    def over(self, begin: int, end: int) -> T:
        """The maximum of the values from ``begin`` to ``end - 1``; the range must not be empty."""
        if self._scans:
            self._scans -= 1
            return reduce(self._larger, self._levels[0][begin:end])
        if len(self._levels) == 1:
            self._make_levels()
        level = (end - begin).bit_length() - 1
        row = self._levels[level]
        return self._larger(row[begin], row[end - (1 << level)])

    def _make_levels(self) -> None:
        width = 1
        while 2 * width <= len(self._levels[0]):
            below = self._levels[-1]
            self._levels.append(list(map(self._larger, below, below[width:])))
            width *= 2
