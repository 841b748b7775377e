"""Sees which tensors operators are about to change, and copies them before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["WrittenTensors"]


class WrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While the mode is active, notes the tensors that an operator writes to, whatever view of them it is given.

    Args:
        watched: the tensors by keys.
        copying: whether to copy them, to the host's memory.

    Attributes:
        written: the keys of the tensors that were written to.
        read: the keys of those that an operator was given, to read or to write.
        copies: their values before, where they are copied.
    """

    def __init__(self, watched: Mapping[int, Tensor], *, copying: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watched, self.copying = dict(watched), copying
        self.written: set[int] = set()
        self.read: set[int] = set()
        self.copies: dict[int, Tensor] = {}
        self._keys: dict[int, list[int]] = defaultdict(list)
        self._memories = [tensor.untyped_storage() for tensor in self.watched.values()]  # which `.data =` would free
        for key, memory in zip(self.watched, self._memories, strict=True):
            self._keys[memory._cdata].append(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, described in enumerate(func._schema.arguments):
            if _is_written(described):
                given = args[place] if place < len(args) else kwargs.get(described.name)
                self._note(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self.read.update(self._keys.get(leaf.untyped_storage()._cdata, ()))
        return func(*args, **kwargs)

    def _note(self, tensors: Any) -> None:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            for key in self._keys.get(tensor.untyped_storage()._cdata, ()):
                if key not in self.written and self.copying:
                    self.copies[key] = self.watched[key].detach().to("cpu", copy=True)
                self.written.add(key)


def _is_written(described: Any) -> bool:
    """Whether an operator may write to an argument. That a batch norm does, its description does not say."""
    alias = described.alias_info
    return bool(alias is not None and alias.is_write) or described.name in {"running_mean", "running_var"}
