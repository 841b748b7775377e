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

_TOGETHER = 12  # parts that begin with one layer and are solved together, with fewer calls; what they read stays cached


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
        self._needs = _Needs(sizes, saved, more_forward, more_backward, slots)
        count, top = len(self._own), slots + 1
        self._seconds = np.empty((count, count, top), dtype=np.float32)  # by first and last layer
        # For a few last layers and every first one: a part's seconds and those before it, if its input takes memory.
        kept = np.full((_TOGETHER, count, top), np.inf, dtype=np.float32)
        sums = np.empty((count, top), dtype=np.float32)
        for start in range(0, count, _TOGETHER):
            lasts = range(start, min(start + _TOGETHER, count))
            for first in reversed(range(lasts.stop)):
                self._solve(first, lasts, kept, sums)

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
        keeps = memory >= self._needs.to_keep[first][last]
        keeping = self._seconds[first + 1, last, left] + self._own[first] if keeps else np.inf
        if keeping <= cutting[at] - self._before[first] or memory < self._needs.to_drop[first][last]:
            return Step(None, left)
        return Step(first + 1 + at, memory - self._sizes[first + 1 + at])

    def _solve(self, first: int, lasts: range, kept: Numbers, sums: Numbers) -> None:
        """Find the seconds by memory of the parts that begin with one layer and end with one of a few.

        Args:
            first, lasts: the parts.
            kept: for each last layer, and each first one behind this one: the seconds of the part between them, and of
                all forwards before it, if its input takes memory besides. The rows of these parts are written.
            sums: room for as many rows as there are layers.
        """
        self._keep(first, lasts)
        # Numpy adds an array without dimensions faster than a single number.
        before, size, top = self._before[first, ...], self._sizes[first], self._slots + 1
        for last in range(max(first + 1, lasts.start), lasts.stop):
            self._cut(first, last, kept[last - lasts.start], before, sums[: last - first])
        if size < top:
            begin = max(first, lasts.start)
            solved = self._seconds[first, begin : lasts.stop, : top - size]
            np.add(solved, before, out=kept[begin - lasts.start : len(lasts), first, size:])

    def _keep(self, first: int, lasts: range) -> None:
        """Write the seconds by memory of some parts if their first layer keeps its graph."""
        of_first, saved, own = self._seconds[first], self._saved[first], self._own[first, ...]
        begin, longer, top = max(first, lasts.start), max(first + 1, lasts.start), self._slots + 1
        if begin == first:
            of_first[first] = own
        if longer < lasts.stop and saved < top:
            rest = self._seconds[first + 1, longer : lasts.stop, : top - saved]
            np.add(rest, own, out=of_first[longer : lasts.stop, saved:])
        for last in range(begin, lasts.stop):
            of_first[last, : self._needs.to_keep[first][last]] = np.inf

    def _cut(self, first: int, last: int, kept_inputs: Numbers, before: Numbers, sums: Numbers) -> None:
        """Write the seconds by memory of a part where a cut of it is faster.

        Args:
            first, last: the part.
            kept_inputs: what :meth:`_solve` has of parts that end with ``last``, by their first layer.
            before: seconds of all forwards before ``first``.
            sums: room for a row for each cut.
        """
        least, most = self._needs.to_drop[first][last], self._needs.fitting[first][last]
        if least >= most:
            return
        of_first = self._seconds[first]
        # Whole rows lie behind one another and are added like one, faster than only the needed units of each.
        np.add(kept_inputs[first + 1 : last + 1], of_first[first:last], out=sums)
        cutting = np.minimum.reduce(sums[:, least:most])
        np.subtract(cutting, before, out=cutting)  # once, instead of from every row
        units = of_first[last, least:most]
        np.minimum(units, cutting, out=units)

    def _cut_at(self, first: int, last: int, memory: int) -> Numbers:
        """The seconds if the part is cut before layer first + 1 … last, in so much memory, and of all forwards before.

        Each sum is rounded as in :meth:`_cut`, so that the best cut is the one that was found there.
        """
        cuts = np.arange(first + 1, last + 1)
        left = memory - np.asarray(self._sizes)[cuts]
        behind = np.where(left >= 0, self._seconds[cuts, last, np.maximum(left, 0)], np.float32(np.inf))
        cutting: Numbers = (behind + self._before[cuts]) + self._seconds[first, first:last, memory]
        return cutting


class _Needs:
    """The units of memory that parts need in their first moments, by first and last layer.

    They are lists, because single numbers of arrays are slow to take. There is no part whose last layer is before its
    first.

    Attributes:
        to_keep: enough for the first layer's forward with its graph, and for its backward.
        to_drop: enough for forwards without graphs, of all layers but the last.
        fitting: enough for every layer to keep its graph; at most ``slots`` + 1.
    """

    def __init__(
        self, sizes: Numbers, saved: Numbers, more_forward: Numbers, more_backward: Numbers, slots: int
    ) -> None:
        count, outputs = len(saved), sizes[1:]
        to_keep = np.maximum((saved + more_forward)[:, None] + outputs, (outputs + saved + more_backward)[:, None])
        # Forwards without graph: of the first layer, whose input is not counted, and the most of those behind it.
        uncounted, counted = outputs + more_forward, sizes[:-1] + outputs + more_forward
        to_drop, fitting = np.zeros_like(to_keep), np.zeros_like(to_keep)
        behind = np.zeros_like(outputs)
        for first in reversed(range(count)):
            most = np.maximum.accumulate([uncounted[first], *counted[first + 1 :]])
            to_drop[first, first:] = outputs[first:] + [most[0], *most[:-1]]
            behind[first:] = np.maximum(to_keep[first, first:], saved[first] + behind[first:])
            fitting[first] = behind
        self.to_keep: list[list[int]] = to_keep.tolist()
        self.to_drop: list[list[int]] = to_drop.tolist()
        self.fitting: list[list[int]] = np.minimum(fitting, slots + 1).tolist()
