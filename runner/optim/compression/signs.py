"""The mean of tensors over replicas at one bit per element; the error is added the next time.

``C(z) = mean|z| * sign(z)``. Each replica compresses the sum of its tensors and its last error (worker error), and
sends every replica a chunk of it. A replica takes the mean of its chunk, compresses the sum of that mean and its own
last error (server error), and sends the result to all. The sent values and the error add up to the input, so errors do
not accumulate.

A scale belongs to a block of 1024 elements of a tensor. The sources have one scale for a whole tensor, but rows of an
embedding differ by orders of magnitude, and with one scale the error is larger. Elements outside a mask are not counted
and stay zero.

Source: Tang et al. 2021, "1-bit Adam", section 4.2, algorithm 1; DeepSpeed's compressed_allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Alone", "Exchange", "SignCompression"]

_BITS = 8
_BLOCK_SIZE = 1024
"""Elements that share a scale; its four bytes add a thirtieth to the bits, in sum a fifteenth of fp16's bytes."""


class Exchange(Protocol):
    """Sends messages between the replicas of a stage. All replicas must call its methods in the same order."""

    @property
    def size(self) -> int:
        """The number of replicas."""
        ...

    @property
    def rank(self) -> int:
        """The number of this replica, from 0."""
        ...

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` to replica r, return what each has sent. Messages to one replica must have equal length."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all replicas, which must have equal length."""
        ...


class Alone:
    """An :class:`Exchange` with only one replica."""

    size = 1
    rank = 0

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


class SignCompression:
    """Holds both errors of one stage's tensors, which are concatenated and cut into a chunk per replica.

    Args:
        sizes: number of elements of each tensor.
        exchange: the replicas.
        device: the device of the tensors.

    Attributes:
        worker_error: [elements], fp32.
        server_error: [elements of this replica's chunk], fp32.
    """

    def __init__(self, sizes: Sequence[int], exchange: Exchange, device: torch.device) -> None:
        self._exchange = exchange
        self._elements = sum(sizes)
        # A chunk is a multiple of 8 elements, whole bytes of signs; the last chunks may be shorter, or empty.
        self._chunk = -(-self._elements // (exchange.size * _BITS)) * _BITS
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self._blocks = [self._blocks_in(*self._span(rank), ends).to(device) for rank in range(exchange.size)]
        self._most_blocks = max(map(len, self._blocks))
        start, end = self._span(exchange.rank)
        self.worker_error = torch.zeros(self._elements, device=device)
        self.server_error = torch.zeros(end - start, device=device)

    @torch.no_grad()
    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """The approximate mean of ``values`` over replicas; the result is the same on every replica.

        Args:
            values: [elements], fp32; overwritten.
            mask: [elements], whether an element is counted; the same on every replica.
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
        """The message of a chunk: signs, then scales; ``left`` becomes the error of the message."""
        positive = left >= 0
        signs = torch.zeros(self._chunk, dtype=torch.bool, device=left.device)
        signs[: len(left)] = positive
        weights = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=left.device)
        packed = (signs.view(-1, _BITS) * weights).sum(dim=1, dtype=torch.uint8)
        scales = torch.zeros(self._most_blocks, device=left.device)
        blocks = self._blocks[rank]
        if len(blocks):
            counted = torch.segment_reduce(mask.float(), "sum", lengths=blocks).clamp(min=1)
            scales[: len(blocks)] = torch.segment_reduce(left.abs(), "sum", lengths=blocks) / counted
        message = torch.cat([packed, scales.view(torch.uint8)])
        left -= self._decompress(message, mask, rank)
        return message

    def _decompress(self, message: Tensor, mask: Tensor, rank: int) -> Tensor:
        """The values of a message: [elements of the chunk], fp32."""
        count = len(mask)
        packed, scales = message[: self._chunk // _BITS], message[self._chunk // _BITS :].clone().view(torch.float32)
        bits = packed.unsqueeze(1) >> torch.arange(_BITS, dtype=torch.uint8, device=message.device)
        values = (bits & 1).flatten()[:count].float().mul_(2).sub_(1)
        blocks = self._blocks[rank]
        return values * scales[: len(blocks)].repeat_interleave(blocks, output_size=count) * mask

    def _span(self, rank: int) -> tuple[int, int]:
        """The first element of a replica's chunk, and the one after its last."""
        return min(rank * self._chunk, self._elements), min((rank + 1) * self._chunk, self._elements)

    @staticmethod
    def _blocks_in(start: int, end: int, ends: Sequence[int]) -> Tensor:
        """Number of elements of each block of a chunk; no block has elements of two tensors."""
        pairs = ((max(a, start), min(b, end)) for a, b in zip(ends, ends[1:], strict=False))
        return torch.tensor(
            [min(_BLOCK_SIZE, b - at) for a, b in pairs for at in range(a, b, _BLOCK_SIZE)], dtype=torch.long
        )

    # Checkpoints

    def load(self, worker_error: Tensor, server_error: Tensor) -> None:
        """Load whole errors, [elements] each: this replica's worker error, and the server errors of all chunks."""
        start, end = self._span(self._exchange.rank)
        self.worker_error.copy_(worker_error)
        self.server_error.copy_(server_error[start:end])
