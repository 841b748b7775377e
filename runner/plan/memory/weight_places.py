"""Where the weights of a model lie, one after the other, and which of them a part of a stage touches."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from runner.profile import LayerProfile, ModelProfile

__all__ = ["WeightPlaces", "weight_places"]


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """The places of a model's trained weights, in elements from the first one.

    Args:
        ends: 0, and after it where each weight ends; empty if this is not known.
        layers: for each layer, the number of weights before its first one; the last two entries are the loss, and the
            number of all weights.
    """

    ends: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    def touched(self, first: int, last: int, start: int, stop: int) -> int:
        """The elements of all weights that have some among those from ``start`` to before ``stop``; 0 if not known.

        Args:
            first, last: the first and the last layer of a stage, from whose first element ``start`` and ``stop`` count.
        """
        if not self.ends:
            return 0
        low, high = self._weights(first, last)
        before = self.ends[low]
        begin = bisect_right(self.ends, before + start, low, high + 1) - 1
        end = bisect_left(self.ends, before + stop, low, high)
        return self.ends[end] - self.ends[begin]

    def sizes(self, first: int, last: int) -> tuple[int, ...]:
        """The elements of each weight of a stage, in order; empty if they are not known."""
        if not self.ends:
            return ()
        low, high = self._weights(first, last)
        return tuple(after - before for before, after in pairwise(self.ends[low : high + 1]))

    def count(self, first: int, last: int) -> int:
        """The number of weights of a stage from its first to its last layer; 0 if it is not known."""
        low, high = self._weights(first, last) if self.ends else (0, 0)
        return high - low

    def _weights(self, first: int, last: int) -> tuple[int, int]:
        """The numbers of a stage's first weight and of the one after its last; the last stage has those of the loss."""
        loss = len(self.layers) - 2
        return self.layers[first], self.layers[loss + 1 if last == loss - 1 else last + 1]


def weight_places(profile: ModelProfile, width: int) -> WeightPlaces:
    """The places of a profile's weights, if an element takes ``width`` bytes."""
    sizes = [_sizes(layer, width) for layer in (*profile.layers, profile.loss)]
    ends = accumulate(chain.from_iterable(sizes), initial=0)
    return WeightPlaces(tuple(ends), tuple(accumulate(map(len, sizes), initial=0)))


def _sizes(layer: LayerProfile, width: int) -> tuple[int, ...]:
    """The elements of each trained weight of a layer, which counts as one weight if they are not known."""
    return tuple(map(math.prod, layer.trained_shapes)) or (layer.gradient_bytes // width,)
