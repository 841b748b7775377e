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

_TOGETHER = 8  # parts that begin with one layer and are solved together: what they read stays in the processor's cache


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
        self._sums = np.empty((count, slots + 1), dtype=np.float32)
        self._fitting = [[0] * count for _ in range(count)]  # units in which every layer of a part keeps its graph
        # For a few last layers and every first one: a part's seconds and those before it, if its input takes memory.
        kept = np.full((_TOGETHER, count, slots + 1), np.inf, dtype=np.float32)
        for start in range(0, count, _TOGETHER):
            end = min(start + _TOGETHER, count)
            for first in range(end - 1, -1, -1):
                self._seconds[first, max(first, start) : end] = np.inf
                for last in range(max(first, start), end):
                    self._solve(first, last, kept[last - start])

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
        cutting = self._cut_at(first, last, memory)
        at = int(cutting.argmin())
        left = memory - self._saved[first]
        keeps = memory >= self._needs.to_keep(first, last)
        keeping = self._seconds[first + 1, last, left] + self._own[first] if keeps else np.inf
        if keeping <= cutting[at] - self._before[first] or memory < self._needs.to_drop(first, last):
            return Step(None, left)
        return Step(first + 1 + at, memory - self._sizes[first + 1 + at])

    def _solve(self, first: int, last: int, kept: Numbers) -> None:
        """Find the seconds of a part by memory.

        Args:
            first, last: the part.
            kept: for each first layer behind this one, the seconds of the part that it begins, and of all forwards
                before it, if its input takes memory besides. This part's row is written.
        """
        of_first, top, needed = self._seconds[first], self._slots + 1, self._needs.to_keep(first, last)
        best = of_first[last]
        if needed < top:
            self._keep(first, last, needed, best)
        behind = self._saved[first] + self._fitting[first + 1][last] if first < last else 0
        self._fitting[first][last] = fitting = max(needed, behind)
        least, most = self._needs.to_drop(first, last), min(fitting, top)
        if first < last and least < most:
            # Whole rows lie behind one another and are added like one, faster than only the needed units of each.
            rows, rest, sums = kept[first + 1 : last + 1], of_first[first:last], self._sums[: last - first]
            np.add(rows, rest, out=sums)
            cutting = np.minimum.reduce(sums[:, least:most])
            cutting -= self._before[first]  # once, instead of from every row
            units = best[least:most]
            np.minimum(units, cutting, out=units)
        size = self._sizes[first]
        if size < top:
            np.add(best[: top - size], self._before[first], out=kept[first, size:])

    def _keep(self, first: int, last: int, least: int, found: Numbers) -> None:
        """Write the seconds by memory if the first layer keeps its graph, for which ``least`` units are enough."""
        if first == last:
            found[least:] = self._own[first]
        else:
            saved = self._saved[first]
            rest = self._seconds[first + 1, last, least - saved : self._slots + 1 - saved]
            np.add(rest, self._own[first], out=found[least:])

    def _cut_at(self, first: int, last: int, memory: int) -> Numbers:
        """The seconds if the part is cut before layer first + 1 … last, in so much memory, and of all forwards before.

        Each sum is rounded as in :meth:`_solve`, so that the best cut is the one that was found there.
        """
        cuts = np.arange(first + 1, last + 1)
        left = memory - np.asarray(self._sizes)[cuts]
        behind = np.where(left >= 0, self._seconds[cuts, last, np.maximum(left, 0)], np.float32(np.inf))
        cutting: Numbers = (behind + self._before[cuts]) + self._seconds[first, first:last, memory]
        return cutting


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
