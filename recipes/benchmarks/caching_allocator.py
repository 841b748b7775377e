"""Simulates how much memory torch's caching allocator reserves on a device.

The size of a request is rounded up to a multiple of 512 bytes. Requests of up to 1 MiB and larger ones have separate
blocks. A request gets the smallest free block that is large enough, and the rest of the block stays free. If there is
no such block, a segment is reserved: 2 MiB for a small request, 20 MiB for a request below 10 MiB, and otherwise the
request's size, rounded up to a multiple of 2 MiB. A freed block is joined with its free neighbours in the segment.
Segments are given back only when the cache is emptied.

Source: c10/cuda/CUDACachingAllocator.cpp. There is one stream, and its limits on splitting blocks are off, which is the
default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["CachingAllocator"]

_ROUNDED = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MIDDLE = 10 << 20
_MIDDLE_SEGMENT = 20 << 20
_LARGE_ROUNDED = 2 << 20


@dataclass(eq=False, slots=True)
class _Block:
    segment: int
    offset: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.offset


class CachingAllocator:
    """Allocates and releases named blocks by the rules in the module's text.

    Attributes:
        allocated, reserved: number of bytes that are allocated and reserved now.
        most_allocated, most_reserved: the peaks of these numbers.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self._held: dict[Hashable, _Block] = {}
        self._free: dict[bool, list[tuple[tuple[int, int, int], _Block]]] = {True: [], False: []}
        self._segments = 0

    def allocate(self, name: Hashable, num_bytes: int) -> None:
        """Allocate ``num_bytes`` under a name that is not in use."""
        assert name not in self._held
        size = max(_ROUNDED, _up(num_bytes, _ROUNDED))
        block = self._fitting(size) or self._reserve(size)
        self._split(block, size)
        self._held[name] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: Hashable) -> None:
        """Release what was allocated under ``name``."""
        block = self._held.pop(name)
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            block = self._join(self._taken(block.before), block)
        if block.after is not None and block.after.free:
            block = self._join(block, self._taken(block.after))
        self._put(block)

    def holds(self, name: Hashable) -> bool:
        """Whether something is allocated under ``name``."""
        return name in self._held

    def empty_cache(self) -> None:
        """Give back all segments in which nothing is allocated."""
        for small, blocks in self._free.items():
            whole = [block for _, block in blocks if block.before is None and block.after is None]
            self.reserved -= sum(block.size for block in whole)
            gone = set(map(id, whole))
            self._free[small] = [entry for entry in blocks if id(entry[1]) not in gone]

    def _fitting(self, size: int) -> _Block | None:
        blocks = self._free[size <= _SMALL]
        index = bisect_left(blocks, size, key=lambda entry: entry[0][0])
        if index == len(blocks):
            return None
        block = blocks.pop(index)[1]
        block.free = False
        return block

    def _reserve(self, size: int) -> _Block:
        small = size <= _SMALL
        middle = _MIDDLE_SEGMENT if size < _MIDDLE else _up(size, _LARGE_ROUNDED)
        block = _Block(self._segments, 0, _SMALL_SEGMENT if small else middle, small)
        self._segments += 1
        self.reserved += block.size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < _ROUNDED or (not block.small and rest <= _SMALL):
            return
        left = _Block(block.segment, block.offset + size, rest, block.small, block, block.after)
        if block.after is not None:
            block.after.before = left
        block.after, block.size = left, size
        self._put(left)

    def _put(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.order, block), key=lambda entry: entry[0])

    def _taken(self, block: _Block) -> _Block:
        blocks = self._free[block.small]
        blocks.pop(bisect_left(blocks, block.order, key=lambda entry: entry[0]))
        block.free = False
        return block

    @staticmethod
    def _join(first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
