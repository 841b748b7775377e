"""Where to cut a chain of layers of different times, if a given number of inputs is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["TimedSplits"]


class TimedSplits:
    """The least seconds of forwards that are run again, for every part of a chain and every number of slots.

    Args:
        seconds: the forward of each layer.
        slots: the most inputs that are kept at once, that of the first layer of a part included.
    """

    def __init__(self, seconds: Sequence[float], slots: int) -> None:
        count = len(seconds)
        self._slots = slots = max(1, min(slots, count))  # a slot for each layer is as many as there can be
        self._until = until = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
        # least[s, d, i]: the part of d layers from i with s slots; without slots, only a single layer is possible
        self._least = least = np.full((slots + 1, count + 1, count), np.inf)
        least[:, 1, :] = 0.0
        for length in range(2, count + 1):
            starts = count - length + 1
            best = least[1:, length, :starts]
            for left in range(1, length):
                again = until[left : left + starts] - until[:starts]
                right = least[:-1, length - left, left : left + starts]
                np.minimum(best, again + right + least[1:, left, :starts], out=best)

    def seconds(self, start: int, length: int, slots: int) -> float:
        """The least seconds of a part's forwards that are run again; one forward per layer with its graph is not in."""
        return float(self._least[min(slots, self._slots), length, start])

    def left(self, start: int, length: int, slots: int) -> int:
        """The number of layers of the left part: the smallest of those with the least seconds."""
        slots, sizes = min(slots, self._slots), np.arange(1, length)
        again = self._until[start + sizes] - self._until[start]
        right = self._least[slots - 1, length - sizes, start + sizes]
        return int(np.argmin(again + right + self._least[slots, sizes, start])) + 1
