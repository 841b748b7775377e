"""The fastest persistent schedules of a chain in given memory, by the dynamic program of rotor.

A schedule is persistent if the input of a part that is run forward again stays until the backward of this part is over.
C(s, t, m) is the least time to run layers s .. t forward and backward in m units of memory, which count the gradient of
the output of t but not the input of s. It is the least of

- keep: seconds of s and C(s + 1, t, m - saved(s)), if m is enough for the forward of s with its graph and for its
  backward;
- cut before j, s < j <= t: forwards of s .. j - 1 and C(j, t, m - size(j)) and C(s, j - 1, m), if m is enough for
  forwards without graphs.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, Optimal Checkpointing for Heterogeneous Chains: How to
Train Deep Neural Networks with Limited Memory. It is optimal among persistent schedules of this model alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChainCosts", "PersistentPlan", "Step"]

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """The costs of a chain of n layers, as arrays. Sizes are bytes.

    Args:
        forward, backward: seconds of each layer.
        sizes: the n + 1 tensors between layers: the input of the chain, and the output of each layer. A gradient is as
            large as its tensor.
        saved: what stays of each layer's forward with its graph, including its output.
        forward_extra: the most that a layer's forward has besides, with a graph or without one.
        backward_extra: the most that a layer's backward has besides what it saved and the gradient of its output;
            includes the gradient of its input.
    """

    forward: Numbers
    backward: Numbers
    sizes: Numbers
    saved: Numbers
    forward_extra: Numbers
    backward_extra: Numbers

    @property
    def peak(self) -> float:
        """The memory in which every layer can keep its graph."""
        before = np.concatenate([[0.0], np.cumsum(self.saved)[:-1]])
        running = self.sizes[-1] + self.saved + self.forward_extra
        return float(np.max(before + np.maximum(running, self.sizes[1:] + self.saved + self.backward_extra)))


class Step(NamedTuple):
    """How a part of the chain begins.

    Args:
        until: the layer before which it is cut; None: the first layer keeps its graph.
        rest: units of memory for the layers that follow.
        partly: the way in which the first layer keeps only a part of its graph; None: it keeps all of it.
    """

    until: int | None
    rest: int
    partly: str | None = None


class PersistentPlan:
    """The table C(s, t, m) of a chain, for m = 0 .. slots units of memory.

    It takes O(n^2 slots) numbers and O(n^3 slots) sums. Times are added in single precision.

    Args:
        costs: the chain.
        memory: bytes of all units together; a size is rounded up to whole units.
        slots: the number of units.
    """

    def __init__(self, costs: ChainCosts, memory: float, slots: int) -> None:
        self._unit = unit = max(memory, 1.0) / slots
        self._slots = slots
        sizes, saved, more_forward, more_backward = (
            np.ceil(values / unit - 1e-9).astype(int)
            for values in (costs.sizes, costs.saved, costs.forward_extra, costs.backward_extra)
        )
        self._sizes, self._saved = sizes.tolist(), saved.tolist()  # single numbers of arrays are slow to take
        self._own = (costs.forward + costs.backward).astype(np.float32)
        self._before = np.concatenate([[0.0], np.cumsum(costs.forward)]).astype(np.float32)
        self._needs = _Needs(sizes, saved, more_forward, more_backward)
        count = len(self._own)
        self._seconds = np.empty((count, count, slots + 1), dtype=np.float32)  # by first and last layer
        # by the last and the first layer of a part: its seconds and those before it, if its input takes memory besides
        self._kept = np.empty((count, count, slots + 1), dtype=np.float32)
        self._sums = np.empty(count * (slots + 1), dtype=np.float32)
        self._fitting = [[0] * count for _ in range(count)]
        for last in range(count):
            for first in range(last, -1, -1):
                self._solve(first, last)

    def seconds(self, first: int, last: int, memory: int) -> float:
        """The least seconds of a part in ``memory`` units; infinite if there is no way."""
        return float(self._seconds[first, last, memory]) if memory >= 0 else float("inf")

    def by_memory(self, first: int, last: int) -> Numbers:
        """The least seconds of a part in 0 .. slots units of memory; infinite where there is no way."""
        seconds: Numbers = self._seconds[first, last].astype(float)
        return seconds

    @property
    def levels(self) -> list[int]:
        """The numbers of units at which the whole chain becomes faster, from the most to the least."""
        whole = self._seconds[0, -1]
        faster = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [*map(int, faster[::-1]), *([0] if np.isfinite(whole[0]) else [])]

    def units(self, num_bytes: float) -> int:
        """So many bytes in whole units."""
        return int(np.ceil(num_bytes / self._unit - 1e-9))

    @property
    def keeping_all(self) -> int:
        """Units of what all layers save together."""
        return sum(self._saved)

    def own(self, layer: int) -> tuple[float, int, int]:
        """The seconds of a layer's forward and backward, and the units of what it saves and of its input."""
        return float(self._own[layer]), self._saved[layer], self._sizes[layer]

    def forward(self, first: int, last: int) -> float:
        """The seconds of forwards of a part."""
        return float(self._before[last + 1] - self._before[first])

    def step(self, first: int, last: int, memory: int) -> Step:
        """How to begin a part that can be run in ``memory`` units."""
        if first == last:
            return Step(None, memory)
        cutting = self._cutting(first, last, memory, memory + 1)[:, 0]
        at = int(cutting.argmin())
        left = memory - self._saved[first]
        keeps = memory >= self._needs.to_keep(first, last)
        keeping = self._seconds[first + 1, last, left] + self._own[first] if keeps else np.inf
        if keeping <= cutting[at] - self._before[first] or memory < self._needs.to_drop(first, last):
            return Step(None, left)
        return Step(first + 1 + at, memory - self._sizes[first + 1 + at])

    def _solve(self, first: int, last: int) -> None:
        best = self._seconds[first, last]
        self._keep(first, last, best)
        least, most = self._needs.to_drop(first, last), self._fits(first, last)  # from `most` on, all is kept
        if first < last and least < most:
            cutting = self._cutting(first, last, least, most).min(axis=0) - self._before[first]
            np.minimum(best[least:most], cutting, out=best[least:most])
        if first:
            size = min(self._sizes[first], self._slots + 1)
            self._kept[last, first, :size] = np.inf
            np.add(best[: self._slots + 1 - size], self._before[first], out=self._kept[last, first, size:])

    def _fits(self, first: int, last: int) -> int:
        """The least units in which every layer of a part keeps its graph, or one more than there are."""
        behind = self._saved[first] + self._fitting[first + 1][last] if first < last else 0
        self._fitting[first][last] = found = max(self._needs.to_keep(first, last), behind)
        return min(found, self._slots + 1)

    def _keep(self, first: int, last: int, found: Numbers) -> None:
        """Write the seconds by memory if the first layer keeps its graph."""
        least = min(self._needs.to_keep(first, last), self._slots + 1)
        found[:least] = np.inf
        if first == last:
            found[least:] = self._own[first]
        else:
            units = slice(least - self._saved[first], self._slots + 1 - self._saved[first])
            np.add(self._seconds[first + 1, last, units], self._own[first], out=found[least:])

    def _cutting(self, first: int, last: int, least: int, most: int) -> Numbers:
        """The seconds by units least .. most - 1 if the part is cut before layer first + 1 … last, a row each.

        They include the forwards before the part, which is one subtraction less for every row.
        """
        units, sums = slice(least, most), self._sums[: (last - first) * (most - least)].reshape(last - first, -1)
        return np.add(self._kept[last, first + 1 : last + 1, units], self._seconds[first, first:last, units], out=sums)


class _Needs:
    """The units of memory that a part needs in its first moments."""

    def __init__(self, sizes: Numbers, saved: Numbers, more_forward: Numbers, more_backward: Numbers) -> None:
        self._sizes = sizes.tolist()
        self._forward = (saved + more_forward).tolist()
        self._backward = (sizes[1:] + saved + more_backward).tolist()
        # Forwards without graph: of the first layer, whose input is not counted, and the most of those behind it.
        first = sizes[1:] + more_forward
        self._dropped = [
            np.maximum.accumulate([first[at], *(sizes[:-1] + first)[at + 1 :]]).tolist() for at in range(len(saved))
        ]

    def to_keep(self, first: int, last: int) -> int:
        """Enough for the first layer's forward with its graph, and for its backward."""
        return int(max(self._sizes[last + 1] + self._forward[first], self._backward[first]))

    def to_drop(self, first: int, last: int) -> int:
        """Enough for forwards without graphs, of all layers but the last."""
        return int(self._sizes[last + 1] + self._dropped[first][max(0, last - 1 - first)])
