"""Counts the bytes of live tensors exactly, on any device: real, fake or meta."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveTracker", "StorageNumbers"]


_OF_CONSTANT = torch.ops.aten.lift_fresh.default
"""Makes an operand of a number that a program gives, and allocates nothing; on fake tensors it makes a new tensor."""


class StorageNumbers:
    """Numbers the storages of tensors; a number is never used again, even after its storage is freed."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()

    def of(self, tensor: Tensor) -> int:
        """The number of the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = next(self._next)
        return self._numbers[storage]


class LiveTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages that operators allocate while the mode is active, and their peak.

    A storage counts from the operator that made it until it is freed. Views and in-place results share the storage of
    their inputs and count nothing. The backward pass is tracked too, because on the CPU it runs in the calling thread.
    On the CPU the peak equals the allocator's to the byte.

    What is made from tensors of the host's memory alone is the host's, too, as on a machine whose device has its own.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_host: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count neither these tensors, which stand for those of a host, nor what is made from them alone."""
        for tensor in tensors:
            self._of_host.add(tensor.untyped_storage())

    def reset_peak(self) -> None:
        """Set the peak to what is alive now."""
        self.peak = self.live

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that was made outside the mode, once, until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._seen or storage in self._of_host:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, num_bytes)

    def counted_bytes(self, tensor: Tensor) -> int:
        """Bytes of the storage if it is counted (made under the mode, or watched), else 0."""
        storage = tensor.untyped_storage()
        return int(storage.nbytes()) if storage in self._seen else 0

    def _freed(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # else a subclass converts the result, a sparse gradient, too
            result = func(*args, **kwargs)
        made = _strided(result) if func is not _OF_CONSTANT else None
        if made:
            storages = [tensor.untyped_storage() for tensor in _strided((args, kwargs))]
            given = {id(storage) for storage in storages}
            if self._of_host and storages and all(storage in self._of_host for storage in storages):
                self.leave_out(made)
            for tensor in made:
                if id(tensor.untyped_storage()) not in given:
                    self.watch(tensor)
        return result


def _strided(values: Any) -> list[Tensor]:
    """The tensors in ``values`` that have a storage; sparse tensors have none."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
