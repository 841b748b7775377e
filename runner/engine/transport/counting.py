"""Counts the bytes that a rank sends, where they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runner.engine.transport.base import Channel, Gathering, Handle, Transport, TransportAround

__all__ = ["CountingTransport", "SentBytes", "ring_bytes"]


def ring_bytes(num_bytes: int, ranks: int) -> float:
    """The bytes that one rank sends in an all-reduce of ``num_bytes`` over a ring of R ranks: 2 (R - 1) / R of them."""
    return 2 * (ranks - 1) / ranks * num_bytes


@dataclass
class SentBytes:
    """A count of bytes, and of messages to one other rank."""

    num_bytes: float = 0.0
    messages: int = 0

    def add(self, num_bytes: float, messages: int) -> None:
        self.num_bytes += num_bytes
        self.messages += messages


class CountingTransport(TransportAround):
    """Wraps another transport and counts what passes it, without the headers of the network's protocols.

    A collective counts when it is called, as the messages into which Gloo and NCCL divide it in a ring of R ranks: an
    all-reduce sends 2 (R - 1) parts, each 1 / R of the tensor, and a gathering R - 1 whole tensors. A test compares the
    counts with those of the system's sockets under Gloo.

    Args:
        inner: the transport that sends.
        sent: the count that is added to.
    """

    def __init__(self, inner: Transport, sent: SentBytes) -> None:
        super().__init__(inner)
        self._sent = sent

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        self._sent.add(tensor.nbytes, 1)
        return super().send(tensor, peer, channel)

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        self._sent.add(ring_bytes(tensor.nbytes, len(group)), 2 * (len(group) - 1))
        return super().all_reduce(tensor, group)

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        messages = len(group) - 1
        self._sent.add(messages * tensor.nbytes, messages)
        return super().start_all_gather(tensor, group)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        return self.start_all_gather(tensor, group).wait()
