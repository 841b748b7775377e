"""Places tensors whose lifetimes are known beforehand in one piece of memory, an arena that is as small as possible.

Tensors that are alive at the same time lie side by side. So no arena is smaller than the most bytes that are alive at
once; to find the smallest one is NP-hard. Here tensors are placed one after the other, each in the smallest gap between
those that are alive with it. They are placed in several orders, and the smallest arena is taken:

- the largest tensors first, as in SmartPool, the allocator of AutoSwap;
- those first that live longest, or whose bytes times lifetime are most;
- in the order in which they are made. This is what an allocator does that does not know what comes: best fit.

From each order a few more are made: the tensors at the end of the arena come first in the next one.

Source: Zhang et al. 2019, Efficient Memory Management for GPU-based Deep Learning Systems, for the first order and the
gaps; the other orders are added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from runner.memory.solve.arena import gaps

__all__ = ["ArenaFigures", "ArenaPlan", "TensorLife", "best_fit", "lives_of", "most_alive", "plan_arena"]


Thing = TypeVar("Thing", bound=Hashable)


class TensorLife(NamedTuple):
    """A tensor's bytes, and the moments at which it is alive: from ``begins`` to ``ends - 1``."""

    num_bytes: int
    begins: int
    ends: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Where tensors lie.

    Args:
        num_bytes: the size of the arena.
        offsets: the first byte of each tensor.
    """

    num_bytes: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArenaFigures:
    """The size of an arena, beside what it is compared with.

    Args:
        tensors: number of tensors.
        bound_bytes: the most bytes that are alive at once; no arena is smaller.
        best_fit_bytes: the arena of an allocator that does not know what comes.
        arena_bytes: the arena that is planned.
    """

    tensors: int
    bound_bytes: int
    best_fit_bytes: int
    arena_bytes: int

    @classmethod
    def of(cls, lives: Sequence[TensorLife]) -> ArenaFigures:
        """The figures of tensors with these lifetimes."""
        return cls(len(lives), most_alive(lives), best_fit(lives).num_bytes, plan_arena(lives).num_bytes)


def lives_of(moments: Iterable[Mapping[Thing, int]]) -> list[TensorLife]:
    """The lifetimes of what is alive at moments that follow each other.

    Args:
        moments: the bytes of each thing that is alive. What is gone and comes back is another tensor, and so is what
            has another size than before.
    """
    found: list[TensorLife] = []
    alive: dict[Thing, tuple[int, int]] = {}  # thing -> its bytes and the moment since which it has been alive
    last = 0
    for now, held in enumerate(moments):
        last = now + 1
        for thing in [each for each, (num_bytes, _) in alive.items() if held.get(each) != num_bytes]:
            found.append(TensorLife(*alive.pop(thing), now))
        for thing, num_bytes in held.items():
            if num_bytes:
                alive.setdefault(thing, (num_bytes, now))
    return sorted([*found, *(TensorLife(*each, last) for each in alive.values())], key=lambda each: each.begins)


def most_alive(lives: Sequence[TensorLife]) -> int:
    """The most bytes that are alive at once."""
    changes = sorted(
        [(each.begins, each.num_bytes) for each in lives] + [(each.ends, -each.num_bytes) for each in lives]
    )  # what ends at a moment is gone before what begins there
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


def best_fit(lives: Sequence[TensorLife]) -> ArenaPlan:
    """The arena of an allocator that places each tensor when it is made, in the smallest gap, and never moves it."""
    return _placed(lives, sorted(range(len(lives)), key=lambda at: lives[at].begins))


def plan_arena(lives: Sequence[TensorLife]) -> ArenaPlan:
    """The smallest arena of the orders in the module's text; it is never larger than that of best fit."""
    bound, best = most_alive(lives), best_fit(lives)
    rounds = min(_ROUNDS, _TENSORS // max(1, len(lives)))
    for key in _ORDERS:
        order = sorted(range(len(lives)), key=lambda at: key(lives[at]))
        for _ in range(1 + rounds):
            if best.num_bytes == bound:
                return best
            made = _placed(lives, order)
            best = min(best, made, key=lambda each: each.num_bytes)
            order.sort(key=lambda at: made.offsets[at] + lives[at].num_bytes < made.num_bytes)
    return best


_ROUNDS = 10  # further orders that are made of one
_TENSORS = 20_000  # tensors that are placed for them: of many tensors there are fewer orders

_ORDERS: tuple[Callable[[TensorLife], tuple[int, int]], ...] = (
    lambda each: (each.begins, 0),
    lambda each: (-each.num_bytes, each.begins),
    lambda each: (-each.num_bytes * (each.ends - each.begins), each.begins),
    lambda each: (each.begins - each.ends, -each.num_bytes),
)


def _placed(lives: Sequence[TensorLife], order: Sequence[int]) -> ArenaPlan:
    """The arena if tensors are placed in an order, each in the smallest gap between those that are alive with it."""
    import numpy as np

    begins = np.array([lives[at].begins for at in order], dtype=np.int64)
    ends = np.array([lives[at].ends for at in order], dtype=np.int64)
    starts, stops = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    offsets, size = [0] * len(lives), 0
    for number, at in enumerate(order):
        one = lives[at]
        beside = np.flatnonzero((begins[:number] < one.ends) & (ends[:number] > one.begins))
        near = beside[np.argsort(starts[beside], kind="stable")]
        taken = zip(starts[near].tolist(), stops[near].tolist(), strict=True)
        offset = _offset(gaps(taken, size), one.num_bytes, max(stops[beside].tolist(), default=0))
        offsets[at] = offset
        starts[number], stops[number] = offset, offset + one.num_bytes
        size = max(size, offset + one.num_bytes)
    return ArenaPlan(size, tuple(offsets))


def _offset(free: Iterable[tuple[int, int]], num_bytes: int, end: int) -> int:
    """The beginning of the smallest gap that is large enough, or ``end``, where the arena grows."""
    large = [(stop - start, start) for start, stop in free if stop - start >= num_bytes]
    return min(large)[1] if large else end
