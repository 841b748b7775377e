"""Lets the replicas of a stage exchange other tensors than gradients, such as compressed momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.transport.base import Channel, Transport

__all__ = ["ReplicaExchange"]


class ReplicaExchange:
    """A :class:`runner.optim.compression.signs.Exchange` over a transport.

    Args:
        transport: this rank's transport.
        group: the global ranks that hold this stage; this rank is one of them.

    Attributes:
        bytes_sent: number of bytes that this rank has sent so far.
        rounds: number of all-gathers so far; each round of an exchange has one.
    """

    def __init__(self, transport: Transport, group: Sequence[int]) -> None:
        self._transport = transport
        self._group = tuple(group)
        self.bytes_sent = 0
        self.rounds = 0

    @property
    def size(self) -> int:
        return len(self._group)

    @property
    def rank(self) -> int:
        return self._group.index(self._transport.rank)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        received = [torch.empty_like(part) for part in parts]
        others = [place for place in range(self.size) if place != self.rank]
        handles = [self._transport.receive(received[at], self._group[at], Channel.MOMENTUM) for at in others]
        handles += [self._transport.send(parts[at], self._group[at], Channel.MOMENTUM) for at in others]
        for handle in handles:
            handle.wait()
        received[self.rank] = parts[self.rank]
        self.bytes_sent += sum(parts[at].nbytes for at in others)
        return received

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [tensor]
        self.bytes_sent += tensor.nbytes * (self.size - 1)
        self.rounds += 1
        return self._transport.start_all_gather(tensor, self._group).wait()
