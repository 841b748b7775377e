"""The tensors that a stage saves of one micro-batch, in a form that can leave the rank and come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from runner.model.dense_parts import dense_parts

__all__ = ["Stash"]


class _Slot:
    """Holds one tensor that autograd saved; empty while the tensor is away."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


class _Place(NamedTuple):
    """Describes a tensor inside the memory that is moved, so that it can be made again."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, memories: Sequence[Tensor]) -> Tensor:
        made = torch.empty(0, dtype=self.dtype, device=memories[self.memory].device)
        return made.set_(memories[self.memory].untyped_storage(), self.offset, self.size, self.stride)


class Stash:
    """Holds the saved tensors of a forward that runs with :meth:`pack` and :meth:`unpack` as its hooks.

    Memory that several tensors share is moved once.

    Args:
        stays: tensors whose memory does not belong to the micro-batch: weights, buffers, the step's batch.
    """

    def __init__(self, stays: Iterable[Tensor]) -> None:
        self._stays = WeakSet(tensor.untyped_storage() for tensor in dense_parts(stays))  # a forward may drop a buffer
        self._slots: list[_Slot] = []
        self._places: list[_Place] = []
        self._boundary: list[tuple[Tensor, _Place]] = []

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(tensor.detach())
        if tensor.layout is torch.strided and tensor.untyped_storage() not in self._stays:  # what is sparse stays
            self._slots.append(slot)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        assert slot.tensor is not None  # the backward waits for its return
        return slot.tensor

    def leave(self, boundary: Iterable[Tensor]) -> list[Tensor]:
        """Release all tensors; return their bytes as flat tensors, one for each memory.

        Args:
            boundary: the stage's input and output; their memory leaves too, except what is in ``stays``.
        """
        memories: dict[int, tuple[int, Tensor]] = {}

        def place(tensor: Tensor) -> _Place:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            number, _ = memories.setdefault(_memory_of(tensor), (len(memories), flat))
            return _Place(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        self._places = [place(slot.tensor) for slot in self._slots if slot.tensor is not None]
        own = [tensor for tensor in boundary if tensor.untyped_storage() not in self._stays]
        self._boundary = [(tensor, place(tensor.detach())) for tensor in own]
        for slot in self._slots:
            slot.tensor = None
        for tensor, _ in self._boundary:
            tensor.data = tensor.data.new_empty(0)
        return [flat for _, flat in memories.values()]

    def come_back(self, memories: Sequence[Tensor]) -> None:
        """Take back the memories that :meth:`leave` returned."""
        for slot, place in zip(self._slots, self._places, strict=True):
            slot.tensor = place.of(memories)
        for tensor, place in self._boundary:
            tensor.data = place.of(memories)
        self._slots, self._places, self._boundary = [], [], []  # from now on the graph alone holds them, and drops them


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
