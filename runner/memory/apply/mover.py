"""Moves memory between a device and its host, with a bound on what is under way.

:mod:`runner.memory.apply.trip` says what is moved and when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import Lane, Load, Pair
from runner.moved_loads import Leaving

__all__ = ["Memory", "MovedTogether", "Mover", "Moving"]

Moving = Callable[[], AbstractContextManager[None]]
"""Makes the context in which moves are begun and waited for, which measures how long that takes."""


class Memory:
    """The memory of saved tensors: on the device, in a buffer of the host, or on its way.

    It gives its buffer back when nothing refers to it any more.

    Args:
        storage: the memory on the device.

    Attributes:
        storage: the same, or where it is fetched to; None while it is away.
        num_bytes: its size.
        together: what it is moved with; None as long as it has not left.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.together: MovedTogether | None = None
        self.target: Tensor | None = None
        self._seen: list[tuple[Tensor, int]] = []
        self._buffer: torch.UntypedStorage | None = None
        self._buffers: HostBuffers | None = None

    def note(self, tensor: Tensor) -> None:
        """Note a tensor in this memory that autograd has saved; it may not change until it has left."""
        if self.together is None:
            self._seen.append((tensor, tensor._version))

    def leave(self, buffers: HostBuffers) -> Pair:
        """Leave the device; return what is to be copied."""
        assert self.storage is not None  # it leaves once
        self._buffers, self._buffer = buffers, buffers.take(self.num_bytes)
        storage, self.storage = self.storage, None
        return Pair(storage, self._buffer)

    def forget_seen(self) -> list[tuple[Tensor, int]]:
        """Return the tensors that were noted, with their versions then, and forget them."""
        seen, self._seen = self._seen, []
        return seen

    def come_back(self, device: torch.device) -> Pair:
        """Get a place on the device; return what is to be copied."""
        assert self._buffer is not None  # it is away
        self.target = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        return Pair(self._buffer, self.target.untyped_storage())

    def arrive(self) -> None:
        """Be on the device again."""
        assert self.target is not None  # it was fetched
        self.storage, self.target = self.target.untyped_storage(), None
        self._give_back()

    def _give_back(self) -> None:
        if self._buffers is not None and self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

    def __del__(self) -> None:
        self._give_back()


class MovedTogether:
    """Memory that leaves as one load and comes back as one.

    Args:
        memories: what is moved; it is not held by this object.
        left: the load on the way out.
        one_by_one: whether it comes back only when all that came back before has been used.

    Attributes:
        num_bytes: their sum.
        back: the load on the way back; None before it is asked for.
        is_used: whether it is on the device again.
    """

    def __init__(self, memories: Sequence[Memory], left: Load, *, one_by_one: bool = False) -> None:
        self._memories = [weakref.ref(memory) for memory in memories]
        self.num_bytes = sum(memory.num_bytes for memory in memories)
        self.left, self.one_by_one = left, one_by_one
        self.back: Load | None = None
        self.is_used = False

    @property
    def needed(self) -> list[Memory]:
        """The memory that something still refers to."""
        return [memory for each in self._memories if (memory := each()) is not None]


class Mover:
    """Moves memory out and back, each in a lane of its own.

    Args:
        device: the device.
        buffers: the host's buffers.
        lanes: the lane out and the lane back.
        room: the most bytes on their way out at once; what is larger by itself goes alone.
        moving: see :data:`Moving`.

    Attributes:
        bytes_moved: bytes that were moved so far, in both directions.
        lanes: the lane out and the lane back.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: HostBuffers,
        lanes: tuple[Lane, Lane],
        room: int,
        moving: Moving = nullcontext,
    ) -> None:
        self.bytes_moved = 0
        self.buffers = buffers
        self._device, self._moving = device, moving
        self.lanes = self._out, self._back = lanes
        self._leaving = Leaving[Load](room)

    def send(self, memories: Sequence[Memory], *, one_by_one: bool = False) -> MovedTogether:
        """Begin to move memory to the host, after waiting until there is room on the way.

        Args:
            memories: what is moved.
            one_by_one: whether to wait until everything that was sent before has left.
        """
        num_bytes = sum(memory.num_bytes for memory in memories)
        with self._moving():
            for earlier in self._leaving.make_room(num_bytes, one_by_one=one_by_one):
                earlier.wait()
            check = _Unchanged(seen for memory in memories for seen in memory.forget_seen())
            load = self._out.carry([memory.leave(self.buffers) for memory in memories], check=check)
        self._leaving.send(load, num_bytes)
        self.bytes_moved += num_bytes
        moved = MovedTogether(memories, load, one_by_one=one_by_one)
        for memory in memories:
            memory.together = moved
        return moved

    def fetch(self, moved: MovedTogether) -> None:
        """Begin to move memory back to the device."""
        with self._moving():
            pairs = [memory.come_back(self._device) for memory in moved.needed]
            moved.back = self._back.carry(pairs, after=moved.left)
        self.bytes_moved += sum(pair.source.nbytes() for pair in pairs)

    def use(self, moved: MovedTogether) -> None:
        """Wait for memory that was fetched."""
        assert moved.back is not None
        with self._moving():
            moved.back.use()
            for left in self._leaving.until(lambda load: load is moved.left):
                left.use()
        for memory in moved.needed:
            memory.arrive()
        moved.is_used = True

    def require_empty(self) -> None:
        """Wait for what is leaving, and check that no memory is left in the host's buffers.

        Raises:
            RuntimeError: some is left, or was changed on its way.
        """
        for load in self._leaving.make_room(0, one_by_one=True):
            load.wait()
        if self.buffers.in_use:
            raise RuntimeError(f"{self.buffers.in_use} bytes of activations are left in the host's memory")


class _Unchanged:
    """Checks that tensors have not been changed since autograd saved them.

    Args:
        seen: the tensors, with their versions at that time.
    """

    def __init__(self, seen: Iterable[tuple[Tensor, int]]) -> None:
        self._seen = list(seen)

    def __call__(self) -> None:
        for tensor, version in self._seen:
            if tensor._version != version:
                shape = tuple(tensor.shape)
                raise RuntimeError(f"a tensor of shape {shape} that autograd has saved was changed in place")
