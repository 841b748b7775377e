"""Which layers keep what they save, which move it to the host's memory, and which are run forward again.

V(s, x, m, f, b) is the least time from the forward of layer s to its backward. x says where its input is, m is the
memory that is left, f and b are the seconds of copies that are still to be done: f by the lane out when the forward of
s begins, b by the lane back when the backward of s has ended, if one looks at the backward from its end. From there a
backward is like a forward: a layer that has run hands its tensors to a lane. V is the least of

- keep: the layer keeps its graph, and what it saves takes memory from all layers that follow;
- move: the same, but what it saves goes to a lane, for which the layer waits if the lane has too much to do;
- cut before j, if layers may be run again: forwards of s .. j - 1 without graphs, and C(s, j - 1, m') for their
  backward, where C is :class:`runner.memory.solve.solvers.persistent.PersistentPlan`; their input is kept or moved.

At the end of the forward, what the lane out has left to do comes before what the lane back must have done.

Source: Beaumont, Eyraud-Dubois, Shilova 2021, Efficient Combination of Rematerialization and Offloading for Training
DNNs (POFO). There a lane may have as many bytes under way as the memory allows; here it has a fixed room, as in
:mod:`runner.memory.apply.mover`, and memory and lanes have units of their own. Without cuts it is the dynamic program
of the authors' paper of 2020, Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training, as far as one
can tell from the second paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.memory.solve.solvers.persistent import ChainCosts, PersistentPlan

__all__ = ["Decision", "Link", "MovePlan"]

Numbers = NDArray[Any]

_ROUNDING = 1e-9


class _Input(IntEnum):
    """The place of a layer's input."""

    OWN = 0
    """Only the layer keeps it."""

    KEPT = 1
    """It belongs to what the layer before keeps on the device, or to the caller of the stage."""

    MOVED = 2
    """It belongs to what the layer before has moved."""


class Decision(NamedTuple):
    """What is done with layers first .. last.

    Args:
        first, last: the layers.
        again: units of memory in which they are run forward again; None: the one layer keeps its graph.
        moved: whether what they keep is moved to the host's memory.
    """

    first: int
    last: int
    again: int | None
    moved: bool


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the device and its host's memory.

    Args:
        copy_seconds: the seconds that a number of bytes takes, in one direction.
        room: the most bytes that are on their way in one direction; what is larger cannot be moved.
        steps: the number of units into which the seconds of a full room are divided.
    """

    copy_seconds: Callable[[float], float]
    room: float
    steps: int


class MovePlan:
    """The table V of a chain, for m = 0 .. slots units of memory.

    With several micro-batches in flight, what is kept takes its memory once for each of them. That the others also keep
    what later layers save is not counted at the moment when an early layer runs.

    Args:
        costs: the chain; its last output stays on the device.
        link: the host's link.
        memory: bytes of all units together; a size is rounded up to whole units.
        slots: the number of units.
        saves_input: for each layer, whether its backward reads its input; None: all do.
        in_flight: the largest number of micro-batches whose saved tensors are alive at once.
        again: the table C, with as much memory and as many units; None: no layer is run again.
    """

    def __init__(
        self,
        costs: ChainCosts,
        link: Link,
        memory: float,
        slots: int,
        *,
        saves_input: Sequence[bool] | None = None,
        in_flight: int = 1,
        again: PersistentPlan | None = None,
    ) -> None:
        self._saves_input = saves_input
        self._costs, self._link, self._again, self._in_flight = costs, link, again, in_flight
        self._unit, self._units = max(memory, 1.0) / slots, np.arange(slots + 1)
        self._lane = _Lane(link)
        self._room = self._whole_units(link.room)
        self._tie = _ROUNDING * float(costs.forward.sum() + costs.backward.sum()) / max(1.0, float(costs.saved.sum()))
        count = len(costs.forward)
        lag = self._lane.seconds
        end = np.broadcast_to(lag[:, None] + lag[None, :], (slots + 1, len(lag), len(lag)))
        self._seconds: list[list[Numbers]] = [[] for _ in range(count)] + [[end] * len(_Input)]
        self._ways: list[list[list[_Way]]] = [[] for _ in range(count)]
        self._best: list[list[Numbers]] = [[] for _ in range(count)]
        for first in range(count - 1, -1, -1):
            for given in _Input:
                self._solve(first, given)

    def seconds(self, memory: int) -> float:
        """The least seconds of the whole chain in ``memory`` units; infinite if there is no way."""
        return float(self._seconds[0][_Input.KEPT][memory, 0, 0])

    @property
    def levels(self) -> list[int]:
        """The numbers of units at which the whole chain becomes faster, from the most to the least."""
        whole = self._seconds[0][_Input.KEPT][:, 0, 0]
        faster = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [*map(int, faster[::-1]), *([0] if np.isfinite(whole[0]) else [])]

    def decisions(self, memory: int) -> Iterator[Decision]:
        """The decisions of a fastest way in ``memory`` units, in which there must be one."""
        first, given, out, back = 0, _Input.KEPT, 0, 0
        while first < len(self._ways):
            way = self._ways[first][given][int(self._best[first][given][memory, out, back])]
            again = memory - self._room - self._whole_units(self._fetched(first, given)) if way.again else None
            yield Decision(first, way.last, again, way.moved)
            out, back = int(way.out.steps[0, out]), int(way.back.steps[memory if way.again else 0, back])
            first, given, memory = way.last + 1, way.leaves, int(way.memory[memory])

    def _solve(self, first: int, given: _Input) -> None:
        ways = [*self._keeping(first, given), *(self._cutting(first, given) if self._again is not None else ())]
        totals = np.stack([self._total(way) for way in ways])
        self._ways[first].append(ways)
        self._best[first].append(totals.argmin(axis=0).astype(np.int16))
        self._seconds[first].append(totals.min(axis=0))

    def _total(self, way: _Way) -> Numbers:
        """The seconds of a way and of all that follows, by memory and by what the lanes have to do."""
        after = self._seconds[way.last + 1][way.leaves]
        following = after[way.memory[:, None, None], way.out.steps[:, :, None], way.back.steps[:, None, :]]
        total: Numbers = following + way.seconds[:, None, None] + way.out.waits[:, :, None] + way.back.waits[:, None, :]
        return total

    def _keeping(self, first: int, given: _Input) -> Iterator[_Way]:
        """The ways in which a layer keeps its graph; what it saves stays or is moved."""
        costs, own = self._costs, self._own(first, given)
        saved, is_last = float(costs.saved[first]), first == len(costs.forward) - 1
        reads = self._saves_input is None or self._saves_input[first]
        forward = costs.sizes[-1] + saved + costs.forward_extra[first] + own
        backward = costs.sizes[first + 1] + saved + costs.backward_extra[first]
        backward += self._fetched(first, given) if reads else own
        seconds = np.full(len(self._units), float(costs.forward[first] + costs.backward[first]))
        seconds[: self._room + self._whole_units(max(forward, backward))] = np.inf
        whole = saved + own
        for moved, rest in ((False, whole), (True, float(costs.sizes[-1]) if is_last else 0.0)):
            way = _Way(first, False, moved, _Input.MOVED if moved else _Input.KEPT, seconds, self._units)
            yield from self._placed(
                way, costs.forward[first : first + 1], costs.backward[first : first + 1], whole, rest
            )

    def _cutting(self, first: int, given: _Input) -> Iterator[_Way]:
        """The ways in which layers keep only their input, which stays or is moved if it is their own."""
        assert self._again is not None
        costs, own = self._costs, self._own(first, given)
        available = self._units - self._room - self._whole_units(self._fetched(first, given))
        running = 0.0
        for last in range(first, len(costs.forward)):
            before = float(costs.sizes[last]) if last > first else 0.0
            running = max(running, before + float(costs.sizes[last + 1] + costs.forward_extra[last]))
            forward = self._again.forward(first, last)
            backward = np.where(available < 0, np.inf, self._again.by_memory(first, last)[np.maximum(available, 0)])
            seconds = forward + backward
            seconds[: self._room + self._whole_units(running + own)] = np.inf
            for moved in (False, True) if own else (False,):
                way = _Way(last, True, moved, _Input.OWN, seconds, self._units)
                yield from self._placed(way, np.array([forward]), backward, own, 0.0 if moved else own)

    def _placed(self, way: _Way, forward: Numbers, backward: Numbers, whole: float, rest: float) -> Iterator[_Way]:
        """A way with what it keeps, or nothing if it cannot be moved.

        Args:
            forward, backward: its seconds; those of the backward may depend on the memory.
            whole: bytes that it keeps or moves.
            rest: the bytes of them that stay on the device.
        """
        going = whole - rest if way.moved else 0.0
        if going > self._link.room or (way.moved and going <= 0):
            return
        copying = self._link.copy_seconds(going) if way.moved else None
        memory = self._units - self._whole_units(self._in_flight * rest)
        seconds = np.where(memory < 0, np.inf, way.seconds + self._tie * going)
        lanes = self._lane.after(forward, copying), self._lane.after(backward, copying)
        yield way._replace(seconds=seconds, memory=np.maximum(memory, 0), out=lanes[0], back=lanes[1])

    def _own(self, first: int, given: _Input) -> float:
        """The bytes of a layer's input that only the layer keeps."""
        return float(self._costs.sizes[first]) if given is _Input.OWN and first else 0.0

    def _fetched(self, first: int, given: _Input) -> float:
        """The bytes that are on the device for a layer's input in its backward, besides what is kept all the time."""
        return float(self._costs.saved[first - 1]) if given is _Input.MOVED else self._own(first, given)

    def _whole_units(self, num_bytes: float) -> int:
        return int(np.ceil(num_bytes / self._unit - _ROUNDING))


class _Lag(NamedTuple):
    """What a lane has to do after a layer, and how long the layer has waited for it, by what it had to do before.

    Args:
        steps: units of seconds; [1 or units of memory, steps before].
        waits: seconds, of the same shape.
    """

    steps: Numbers
    waits: Numbers


class _Lane:
    """One direction of the link."""

    def __init__(self, link: Link) -> None:
        self._full = link.copy_seconds(link.room) if link.room else 0.0
        self._unit = self._full / link.steps
        self.seconds = np.arange(link.steps + 1) * self._unit if self._full else np.zeros(1)

    def after(self, running: Numbers, copying: float | None) -> _Lag:
        """The lane after layers that run for so many seconds and then move something.

        Args:
            running: seconds, one number or one for each number of units of memory.
            copying: seconds of what is moved; None: nothing is.
        """
        left = np.maximum(0.0, self.seconds[None, :] - running[:, None])
        waits = np.zeros_like(left)
        if copying is not None:
            waits = np.maximum(0.0, left + copying - self._full)
            left = left + copying - waits
        steps = np.ceil(left / self._unit - _ROUNDING) if self._full else np.zeros_like(left)
        return _Lag(steps.astype(int), waits)


_NOTHING = _Lag(np.zeros((1, 1), dtype=int), np.zeros((1, 1)))


class _Way(NamedTuple):
    """A decision about the first layers of a part.

    Args:
        last: the last of these layers.
        again: whether they are run again.
        moved: whether what they keep is moved.
        leaves: where the input of the layer that follows is.
        seconds: their seconds by units of memory; infinite where these do not suffice.
        memory: the units that are left, by units before.
        out, back: the lanes.
    """

    last: int
    again: bool
    moved: bool
    leaves: _Input
    seconds: Numbers
    memory: Numbers
    out: _Lag = _NOTHING
    back: _Lag = _NOTHING
