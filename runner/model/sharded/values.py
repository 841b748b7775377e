"""Which part of a weight a rank holds, and how whole tensors are cut and parts joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.model.sharded.group import ShardGroup

__all__ = ["HeldPart", "Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a weight that one rank of a group holds.

    Args:
        dim: the dimension that is divided.
        index, degree: the number of the part, from 0, and the number of parts.
        whole: the weight's shape.
        pieces: how many blocks lie one behind the other along ``dim``, each of which is divided: a weight that makes
            query, key and value has three.
        blocks: the lengths of these blocks in the weight, where they are not all of one length.
        padding: rows of zeros that the last part has beyond the weight, so that all parts are of one length. No file
            holds them.
    """

    dim: int
    index: int
    degree: int
    whole: tuple[int, ...]
    pieces: int = 1
    padding: int = 0
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        length = self.whole[self.dim] + self.padding
        if length % (self.degree * self.pieces) or (self.padding and self.pieces > 1):
            raise ValueError(f"{length} rows in {self.pieces} pieces cannot be divided among {self.degree} ranks")
        if self.blocks and (sum(self.blocks) != length or any(each % self.degree for each in self.blocks)):
            raise ValueError(f"{length} rows in blocks of {self.blocks} cannot be divided among {self.degree} ranks")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        shape = list(self.whole)
        shape[self.dim] = (shape[self.dim] + self.padding) // self.degree
        return tuple(shape)

    @property
    def bare_shape(self) -> tuple[int, ...]:
        """The shape of the part without padding."""
        rows = self.shape[self.dim]
        own = min(rows, max(0, self.whole[self.dim] - rows * self.index)) if self.padding else rows
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :])

    def without_padding(self, part: Tensor) -> Tensor:
        """The rows of this part that are the weight's."""
        return part.narrow(self.dim, 0, self.bare_shape[self.dim])

    @property
    def is_plain(self) -> bool:
        """Whether the parts, one behind the other, are the weight."""
        return self.pieces == 1 and not self.padding and not self.blocks

    def cut(self, whole: Tensor) -> Tensor:
        """A copy of this part of a tensor of the weight's shape."""
        pieces = self._in_pieces(self._padded(whole), self.blocks)
        blocks = [piece.chunk(self.degree, self.dim)[self.index] for piece in pieces]
        if len(blocks) > 1:
            return torch.cat(blocks, self.dim)
        return blocks[0].clone(memory_format=torch.contiguous_format)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of the parts of all ranks, in their order."""
        blocks = tuple(each // self.degree for each in self.blocks)
        pieces = [self._in_pieces(part, blocks) for part in parts]
        whole = torch.cat([block for own in zip(*pieces, strict=True) for block in own], self.dim)
        return whole.narrow(self.dim, 0, self.whole[self.dim])

    def _in_pieces(self, value: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return torch.split(value, list(blocks), self.dim) if blocks else value.chunk(self.pieces, self.dim)

    def _padded(self, whole: Tensor) -> Tensor:
        if not self.padding:
            return whole
        shape = list(self.whole)
        shape[self.dim] = self.padding
        return torch.cat([whole, whole.new_zeros(shape)], self.dim)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a weight with the ranks that have the others. Implements
    :class:`runner.optim.states.whole_norms.PartOfWeight`.

    Args:
        shard: which part it is.
        group: the ranks.
    """

    shard: Shard
    group: ShardGroup

    @property
    def degree(self) -> int:
        return self.shard.degree

    def sum(self, value: Tensor) -> Tensor:
        return self.group.exchange.all_reduce(value)

    def whole(self, part: Tensor) -> Tensor:
        parts = self.group.exchange.all_gather(part, self.shard.dim)
        return parts if self.shard.is_plain else self.shard.join(parts.chunk(self.degree, self.shard.dim))

    def own(self, whole: Tensor) -> Tensor:
        return self.shard.cut(whole)

    def clear_padding(self, part: Tensor) -> None:
        own, rows = self.shard.bare_shape[self.shard.dim], part.shape[self.shard.dim]
        if own < rows:
            part.narrow(self.shard.dim, own, rows - own).zero_()
