"""The fastest persistent schedules of a stage with several micro-batches in flight.

What the first forward leaves to the backward is there once for each micro-batch in flight, but only one of them runs
again at a time. So the memory is split: ``stash`` units for what each first forward leaves, and ``again`` units in
which each part that was cut off is run again. The whole is then about in_flight * stash + again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from runner.memory.solve.solvers.persistent import PersistentPlan, Step

__all__ = ["FirstForward", "Partly"]


class Partly(NamedTuple):
    """A way to keep a part of what a layer saves, and to make the rest again right before its backward.

    Args:
        name: the name of the way.
        seconds: the layer's forward, the part of a forward that is run again, and its backward.
        units: what it keeps, including the layer's output.
    """

    name: str
    seconds: float
    units: int


class FirstForward:
    """What first forwards leave, for a number of units in which parts are run again.

    E(s, m), the least seconds of layers s .. n - 1 whose first forward leaves m units, is the least of what the layer
    takes if it keeps its graph and E(s + 1, m - saved(s)), and of forwards of s .. j - 1 and C(s, j - 1, again) and
    E(j, m - size(j)), if they are cut off. A layer that keeps a part of its graph is one more way.

    Args:
        plan: the table C of the chain.
        count: the number of layers.
        again: units in which a part is run again.
        slots: the most units of a stash.
        partly: for each layer, ways to keep a part of its graph; empty = none has any.
    """

    def __init__(
        self, plan: PersistentPlan, count: int, again: int, slots: int, partly: Sequence[Sequence[Partly]] = ()
    ) -> None:
        self._plan, self._count, self._again, self._slots = plan, count, again, slots
        self._partly: Sequence[Sequence[Partly]] = partly or [()] * count
        self._least = np.full((count + 1, slots + 1), np.inf)
        self._least[count] = 0.0
        for first in range(count - 1, -1, -1):
            self._least[first] = self._ways(first).min(axis=0)

    @property
    def levels(self) -> list[tuple[int, float]]:
        """The numbers of units at which the whole becomes faster, from the most to the least, with the seconds."""
        whole = self._least[0]
        faster = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        least = [0] if np.isfinite(whole[0]) else []
        return [(int(units), float(whole[units])) for units in (*faster[::-1], *least)]

    def step(self, first: int, stash: int) -> Step:
        """How to begin the layers from ``first`` on, which leave ``stash`` units."""
        at = int(self._ways(first)[:, stash].argmin())
        _, saved, _ = self._plan.own(first)
        if at == 0:
            return Step(None, stash - saved)
        if at > self._count - first:
            way = self._partly[first][at - (self._count - first) - 1]
            return Step(None, stash - way.units, way.name)
        return Step(first + at, stash - self._size(first + at))

    def _ways(self, first: int) -> np.ndarray:
        """The seconds by units: the layer keeps its graph, or the part before layer first + 1 … count is cut off, or
        the layer keeps a part of its graph.
        """
        cuts, own_ways = self._count - first, self._partly[first]
        ways = np.full((1 + cuts + len(own_ways), self._slots + 1), np.inf)
        own, saved, _ = self._plan.own(first)
        partly = ((1 + cuts + at, way.seconds, way.units) for at, way in enumerate(own_ways))
        for row, seconds, units in ((0, own, saved), *partly):
            if units <= self._slots:
                ways[row, units:] = seconds + self._least[first + 1, : self._slots + 1 - units]
        for until in range(first + 1, self._count + 1):
            seconds = self._plan.seconds(first, until - 1, self._again) + self._plan.forward(first, until - 1)
            size = self._size(until)
            if seconds < np.inf and size <= self._slots:
                ways[until - first, size:] = seconds + self._least[until, : self._slots + 1 - size]
        return ways

    def _size(self, layer: int) -> int:
        """Units of a layer's input; what leaves the chain is the caller's."""
        return self._plan.own(layer)[2] if layer < self._count else 0
