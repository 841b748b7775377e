"""Keeps what a user's modules are and hold, so that it can be put back after they have run for a trial.

A forward may change more than buffers: weights (a momentum encoder, a layer that clips its own weight), attributes,
lists, counters, random generators, variables of closures and of the user's own modules. Where tensors are too many to
be copied at once, those are copied that a first run is about to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from runner.model.seeds import keep_generators
from runner.model.walk import Walk
from runner.model.written import WrittenTensors

__all__ = ["KeptState"]

_MOST_BYTES_TO_COPY = 256 << 20


class KeptState:
    """The present state of modules and of other objects that take part in a run.

    Args:
        objects: pairs of a name and a module, function or other object.
        most_bytes: the most bytes of tensors and arrays that are copied at once, to the host's memory.
        moved: whether others exchange the memory of weights, so that theirs is not put back, but their values.
    """

    def __init__(
        self, objects: Iterable[tuple[str, Any]], *, most_bytes: int = _MOST_BYTES_TO_COPY, moved: bool = False
    ) -> None:
        self._walk, self._moved = Walk(objects, most_bytes), moved
        self._generators = keep_generators()
        self._aliases = {key: tensor.detach() for key, (_, tensor) in self._walk.tensors.items()}
        self._copies = self._copy_tensors(most_bytes)
        left = {key: tensor for key, (_, tensor) in self._walk.tensors.items() if key not in self._copies}
        self._written, self._versions = WrittenTensors(left, copying=True), {k: t._version for k, t in left.items()}

    @property
    def copies_late(self) -> bool:
        """Whether there are tensors that are copied only if the first run changes them."""
        return bool(self._versions)

    def first_run(self) -> AbstractContextManager[Any]:
        """In this context, tensors that were too many to be copied are copied before an operator changes them."""
        return self._written if self.copies_late else nullcontext()

    def put_back(self) -> list[str]:
        """Make everything what it was; return the names of what has changed and cannot be put back."""
        for part in self._walk.parts:
            part.put_back(self._walk.instead)
        self._generators()
        lost = [name for key, (name, tensor) in self._walk.tensors.items() if not self._put_tensor(key, tensor)]
        return [*lost, *self._walk.lost()]

    def _copy_tensors(self, most_bytes: int) -> dict[int, Tensor]:
        """Copies of the smallest tensors."""
        copies = {}
        for key, (_, tensor) in sorted(self._walk.tensors.items(), key=lambda item: item[1][1].nbytes):
            most_bytes -= tensor.nbytes
            if most_bytes < 0:
                break
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies

    def _put_tensor(self, key: int, tensor: Tensor) -> bool:
        """Put a tensor's memory and values back; False if it has changed and its values are not known."""
        before, alias = self._copies.get(key, self._written.copies.get(key)), self._aliases[key]
        if tensor.shape != alias.shape or (tensor.data_ptr() != alias.data_ptr() and not self._moved):
            tensor.data = alias
        if before is None:
            return bool(tensor._version == self._versions[key])
        with torch.no_grad():
            _without_repeats(tensor.data, alias).copy_(_without_repeats(before, alias))
        return True


def _without_repeats(tensor: Tensor, repeated: Tensor) -> Tensor:
    """The part of ``tensor`` in which every element of ``repeated``, which ``expand`` may have made, is once."""
    for axis, stride in enumerate(repeated.stride()):
        if not stride and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
