"""The mean of tensors over replicas at one bit per element, with what is left over added the next time.

``C(z) = mean|z| * sign(z)``. Each replica compresses what it has and what it left over (worker error), sends every
replica its chunk, which takes the mean, compresses that and what it left over (server error), and sends it to all.
What was sent and what is left over add up to what came in: the errors telescope.

The scale is of the part of a tensor that lies in a chunk. Elements outside a mask count for nothing and stay zero.

Source: Tang et al. 2021, "1-bit Adam", section 4.2, algorithm 1; DeepSpeed's compressed_allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Alone", "Exchange", "SignCompression"]

_BITS = 8


class Exchange(Protocol):
    """Messages between the replicas of a stage. Every replica calls every method in the same order."""

    @property
    def size(self) -> int:
        """How many replicas."""
        ...

    @property
    def rank(self) -> int:
        """This one's place among them."""
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """``parts[r]`` goes to replica r; what came from each. Messages to one replica are as long as each other's."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The replicas' tensors, of one length."""
        ...


class Alone:
    """An :class:`Exchange` of one."""

    size = 1
    rank = 0

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


class SignCompression:
    """Holds both errors of one stage's tensors, laid out one after the other and cut into a chunk per replica.

    Args:
        sizes: elements of each tensor.
        exchange: the replicas.
        device: of the tensors.

    Attributes:
        worker_error: [elements], fp32.
        server_error: [elements of this replica's chunk], fp32.
    """

    def __init__(self, sizes: Sequence[int], exchange: Exchange, device: torch.device) -> None:
        self._exchange = exchange
        self._elements = sum(sizes)
        # A chunk ends with a byte; the last ones may be shorter, or empty.
        self._chunk = -(-self._elements // (exchange.size * _BITS)) * _BITS
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self._segments = [self._segments_in(*self._span(rank), ends) for rank in range(exchange.size)]
        self._most_segments = max(map(len, self._segments))
        start, end = self._span(exchange.rank)
        self.worker_error = torch.zeros(self._elements, device=device)
        self.server_error = torch.zeros(end - start, device=device)

    @torch.no_grad()
    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """The replicas' mean of ``values``, approximately: the same numbers on every replica.

        Args:
            values: [elements], fp32; overwritten.
            mask: [elements], whether an element counts; the same on every replica.
        """
        exchange = self._exchange
        self.worker_error += values
        self.worker_error *= mask
        messages = []
        for rank in range(exchange.size):
            start, end = self._span(rank)
            messages.append(self._compress(self.worker_error[start:end], mask[start:end], rank))
        start, end = self._span(exchange.rank)
        for part in exchange.all_to_all(messages):
            self.server_error += self._decompress(part, mask[start:end], exchange.rank) / exchange.size
        own = self._compress(self.server_error, mask[start:end], exchange.rank)
        for rank, part in enumerate(exchange.all_gather(own)):
            start, end = self._span(rank)
            values[start:end] = self._decompress(part, mask[start:end], rank)
        return values

    def _compress(self, left: Tensor, mask: Tensor, rank: int) -> Tensor:
        """The message of a chunk: signs, then scales; ``left`` keeps what the message does not say."""
        positive = left >= 0
        signs = torch.zeros(self._chunk, dtype=torch.bool, device=left.device)
        signs[: len(left)] = positive
        weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=left.device)
        packed = (signs.view(-1, _BITS) * weights).sum(dim=1, dtype=torch.uint8)
        scales = torch.zeros(self._most_segments, device=left.device)
        for number, (start, end) in enumerate(self._segments[rank]):
            counted = mask[start:end].sum().clamp(min=1)
            scales[number] = left[start:end].abs().sum() / counted
        message = torch.cat([packed, scales.view(torch.uint8)])
        left -= self._decompress(message, mask, rank)
        return message

    def _decompress(self, message: Tensor, mask: Tensor, rank: int) -> Tensor:
        """[elements of the chunk], fp32."""
        count = len(mask)
        packed, scales = message[: self._chunk // _BITS], message[self._chunk // _BITS :].clone().view(torch.float32)
        bits = packed.unsqueeze(1) >> torch.arange(_BITS, dtype=torch.uint8, device=message.device)
        values = (bits & 1).flatten()[:count].float().mul_(2).sub_(1)
        for number, (start, end) in enumerate(self._segments[rank]):
            values[start:end] *= scales[number]
        return values * mask

    def _span(self, rank: int) -> tuple[int, int]:
        """Where a replica's chunk begins and ends."""
        return min(rank * self._chunk, self._elements), min((rank + 1) * self._chunk, self._elements)

    @staticmethod
    def _segments_in(start: int, end: int, ends: Sequence[int]) -> list[tuple[int, int]]:
        """The parts of tensors in a chunk, from its start."""
        pairs = ((max(a, start), min(b, end)) for a, b in zip(ends, ends[1:], strict=False))
        return [(a - start, b - start) for a, b in pairs if a < b]

    # Checkpoints

    def load(self, worker_error: Tensor, server_error: Tensor) -> None:
        """Take whole errors, [elements] each: this replica's own, and that of all chunks."""
        start, end = self._span(self._exchange.rank)
        self.worker_error.copy_(worker_error)
        self.server_error.copy_(server_error[start:end])
