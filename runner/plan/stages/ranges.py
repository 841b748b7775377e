"""Sums and maxima over ranges of a list, each in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

__all__ = ["RangeMaximum", "prefix"]


def prefix(values: Iterable[int]) -> list[int]:
    """The prefix sums of ``values``: ``result[j] - result[i]`` is the sum of the values from i to j - 1."""
    return list(accumulate(values, initial=0))


class RangeMaximum:
    """Gives the largest value of any range, from a table of the maxima of all ranges of length 2**k."""

    def __init__(self, values: Sequence[int]) -> None:
        self._levels = [list(values)]
        width = 1
        while 2 * width <= len(values):
            below = self._levels[-1]
            self._levels.append(list(map(max, below, below[width:])))
            width *= 2

    def over(self, begin: int, end: int) -> int:
        """The maximum of the values from ``begin`` to ``end - 1``; the range must not be empty."""
        level = (end - begin).bit_length() - 1
        row = self._levels[level]
        return max(row[begin], row[end - (1 << level)])
