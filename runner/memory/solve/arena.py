"""A simulated arena: memory in one piece, in which every value needs a gap that is large enough for all of it.

When there is none, the cheapest values that lie side by side are dropped, so that their memory is one gap. Dropping
single values by their scores, wherever they lie, would leave gaps between others: as many bytes, but no room.

Source: Zhang et al. 2023, Coop: Memory is not a Commodity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import ClassVar, Generic, NamedTuple, TypeVar

from runner.memory.solve.evicting import EvictingProgram

__all__ = ["Arena", "ArenaProgram", "gaps"]

Item = TypeVar("Item", bound=Hashable)


class ArenaProgram(EvictingProgram):
    """An evicting program whose pool is an arena: what is kept has addresses, and what is dropped lies side by side."""

    __slots__ = ()

    installer: ClassVar[str] = "runner.memory.apply.arena_pool:install_arena"


class _Block(NamedTuple, Generic[Item]):
    """A part of the arena: an item, or a gap if there is none."""

    start: int
    end: int
    item: Item | None


def gaps(taken: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each gap of an arena, in the order of their addresses.

    Args:
        taken: what is not free, as the same pairs, sorted; they may overlap, and be empty.
        end: the size of the arena.
    """
    at = 0
    for start, stop in taken:
        if at < start < stop:
            yield at, start
        at = max(at, stop) if start < stop else at
    if at < end:
        yield at, end


class Arena(Generic[Item]):
    """Places items in memory.

    Args:
        num_bytes: its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._places: dict[Item, tuple[int, int]] = {}
        self.peak_bytes = 0

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    @property
    def held_bytes(self) -> int:
        """The bytes of all items."""
        return sum(end - start for start, end in self._places.values())

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that are not in the largest gap."""
        sizes = [end - start for start, end in self._gaps()]
        return 1 - max(sizes) / sum(sizes) if sizes else 0.0

    def place(self, item: Item, num_bytes: int, *, from_end: bool = False) -> bool:
        """Place an item in the first gap that is large enough, from one end or the other; say whether there is one."""
        free = [(start, end) for start, end in self._gaps() if end - start >= num_bytes]
        if num_bytes and not free:
            return False
        start = 0
        if free:
            start = free[-1][1] - num_bytes if from_end else free[0][0]
        self._places[item] = start, start + num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return True

    def shrink(self, item: Item, num_bytes: int) -> None:
        """Free all but the first bytes of an item."""
        start, _ = self._places[item]
        self._places[item] = (start, start + num_bytes)

    def remove(self, item: Item) -> None:
        """Free the memory of an item."""
        del self._places[item]

    def window(self, num_bytes: int, cost: Callable[[Item], float | None]) -> list[Item] | None:
        """The items side by side, with the gaps between them, whose removal makes such a gap for the least cost.

        As costs are not negative, the best window that ends at a block is the shortest that is large enough: each block
        enters and leaves once.

        Args:
            num_bytes: the size of the gap.
            cost: what the removal of an item costs; None = it must stay.
        """
        if not num_bytes:
            return []
        best: tuple[float, list[Item]] | None = None
        inside: list[tuple[_Block[Item], float]] = []
        for block in self._blocks():
            own = 0.0 if block.item is None else cost(block.item)
            if own is None:
                inside = []
                continue
            inside.append((block, own))
            while len(inside) > 1 and block.end - inside[1][0].start >= num_bytes:
                inside.pop(0)
            if block.end - inside[0][0].start < num_bytes:
                continue
            total = sum(each for _, each in inside)
            if best is None or total < best[0]:
                best = total, [each.item for each, _ in inside if each.item is not None]
        return None if best is None else best[1]

    def _gaps(self) -> list[tuple[int, int]]:
        return list(gaps(sorted(self._places.values()), self._num_bytes))

    def _blocks(self) -> list[_Block[Item]]:
        """The items and gaps in the order of their addresses."""
        found: list[_Block[Item]] = []
        at = 0
        for item, (start, end) in sorted(self._places.items(), key=lambda each: each[1]):
            if start == end:
                continue
            if at < start:
                found.append(_Block(at, start, None))
            found.append(_Block(start, end, item))
            at = end
        if at < self._num_bytes:
            found.append(_Block(at, self._num_bytes, None))
        return found
