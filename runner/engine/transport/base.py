"""Moves tensors between ranks: one interface, with an in-process and a process-group implementation.

Point-to-point messages use channels. Each (source, destination, channel) is a FIFO. The engine needs no other order,
because both ends take their sends and receives from one global order of the schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Channel", "Gathering", "Handle", "Transport", "TransportAround"]

_NOTHING_HELD = nullcontext()


class Channel(IntEnum):
    """The kind of content of a message. Its value is the message's tag."""

    ACTIVATION = 0  # between two steps, also what belongs to a layer that another rank holds from then on
    GRADIENT = 1
    HEADER = 2  # once per step to the next rank: number of samples and their shapes
    SPEC = 3  # to the next rank, when a boundary's shapes are new
    TOTALS = 4  # once per step, from the last stage's rank to every other rank: the loss
    ASKS = 5  # once per step, from the last rank that gets the header to the last stage's rank, if they differ
    MOMENTUM = 6  # between replicas, for optimizers that compress it
    PARTS = 8  # between ranks that divide layers
    INPUT = 7  # input of a stage, for the rank of its backward, if another rank runs its forward


class Handle(Protocol):
    """A transfer that has begun. Its tensors must stay alive until :meth:`wait` has returned."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Gathering(Protocol):
    """A gathering that has begun."""

    def wait(self) -> list[Tensor]:
        """Return the group's tensors, in the group's order."""
        ...


class Transport(ABC):
    """Sends and reduces for one rank. Ranks are global; a group is a tuple of global ranks in order."""

    rank: int
    device: torch.device

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        """Start to send a contiguous tensor, which must not change until the handle has completed."""

    @abstractmethod
    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        """Start to receive into ``buffer``, which is valid after the handle's ``wait``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        """Start to sum ``tensor`` over the group, in place."""

    @abstractmethod
    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        """Start to gather the group's tensors, which must have the same shape."""

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        """Gather the group's tensors, of the same shape, in the group's order; blocks."""
        return self.start_all_gather(tensor, group).wait()

    def tells_completion(self, num_bytes: int) -> bool:
        """Whether ``is_completed`` of a send of this length becomes true without ``wait``."""
        return True

    def exclusive(self) -> AbstractContextManager[object]:
        """A lock that is held while this rank computes: ranks of one process share a random generator."""
        return _NOTHING_HELD

    def aside(self) -> AbstractContextManager[object]:
        """Within the block, a rank that holds :meth:`exclusive` waits for others and lets them compute."""
        return _NOTHING_HELD

    def send_bytes(self, data: bytes, peer: int, channel: Channel) -> list[tuple[Handle, Tensor]]:
        """Start to send a short byte string; return its two messages, which must stay alive until they have left."""
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=self.device)
        return [(self.send(message, peer, channel), message) for message in (size, payload)]

    def receive_bytes(self, peer: int, channel: Channel) -> bytes:
        """Receive a byte string from :meth:`send_bytes`."""
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        self.receive(size, peer, channel).wait()
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        self.receive(payload, peer, channel).wait()
        return bytes(payload.cpu().tolist())


class TransportAround(Transport):
    """Wraps another transport; a subclass changes some of its methods."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.device = inner.rank, inner.device
        self._inner = inner

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        return self._inner.send(tensor, peer, channel)

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        return self._inner.receive(buffer, peer, channel)

    def tells_completion(self, num_bytes: int) -> bool:
        return self._inner.tells_completion(num_bytes)

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        return self._inner.all_reduce(tensor, group)

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        return self._inner.start_all_gather(tensor, group)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        return self._inner.all_gather(tensor, group)

    def exclusive(self) -> AbstractContextManager[object]:
        return self._inner.exclusive()

    def aside(self) -> AbstractContextManager[object]:
        return self._inner.aside()
