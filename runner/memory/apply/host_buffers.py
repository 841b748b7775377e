"""The host's buffers for tensors that are away from their device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

__all__ = ["HostBuffers"]

Make = Callable[[int], torch.UntypedStorage]


class HostBuffers:
    """A pool of buffers of the host's memory, which are used again and again.

    A buffer serves tensors of its own size only. If there is no free one of a size and the pool is full, it drops free
    buffers of other sizes.

    Args:
        capacity: the most bytes that all buffers may have together, in use or free.
        pinned: whether they are page-locked, so that a device's copies run while it computes.
        make: makes the memory of a number of bytes, e.g. in a file; None: it is the host's.

    Attributes:
        held: bytes of all buffers.
        in_use: bytes of those that are lent.
    """

    def __init__(self, capacity: int, *, pinned: bool = False, make: Make | None = None) -> None:
        self.held = 0
        self.in_use = 0
        self._capacity = capacity
        self._pinned = pinned
        self._make = make
        self._free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Lend a buffer of ``num_bytes``.

        Raises:
            RuntimeError: it would be more than the pool's capacity; the plan has counted other tensors than there are.
        """
        free = self._free[num_bytes]
        if not free:
            self._make_room(num_bytes)
            self.held += num_bytes
            free.append(self._made(num_bytes))
        self.in_use += num_bytes
        return free.pop()

    def give_back(self, buffer: torch.UntypedStorage) -> None:
        """Take back a buffer that was lent."""
        self.in_use -= buffer.nbytes()
        self._free[buffer.nbytes()].append(buffer)

    def _made(self, num_bytes: int) -> torch.UntypedStorage:
        """A new buffer; it is made without an operator, so that no tracker counts it as the device's."""
        if self._make is not None:
            return self._make(num_bytes)
        if self._pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
        where = torch.empty(0).untyped_storage().device  # "meta" where a run is played on fake tensors
        return torch.UntypedStorage(num_bytes, device=where)  # type: ignore[no-untyped-call]

    def _make_room(self, num_bytes: int) -> None:
        for size, buffers in self._free.items():
            while buffers and self.held + num_bytes > self._capacity:
                buffers.pop()
                self.held -= size
        if self.held + num_bytes > self._capacity:
            needed = self.in_use + num_bytes
            raise RuntimeError(f"activations need {needed} bytes of host memory at once, planned were {self._capacity}")
