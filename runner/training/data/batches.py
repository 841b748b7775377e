"""Makes the batch that a rank hands to the engine from samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.engine.window import StepBatch
from runner.model.boundary import flatten, map_tensors
from runner.model.data import Collate, collated
from runner.model.seeds import seeded

__all__ = ["Batches", "batch_checksum"]


class Batches:
    """Makes a :class:`StepBatch` from a replica's samples, with the parts that this rank needs.

    Args:
        collate: samples to ``(input, target)``.
        inputs, targets: whether the rank has the first or the last stage.
        seed: seeds the random generators of ``collate``, together with the step.
    """

    def __init__(self, collate: Collate, *, inputs: bool, targets: bool, seed: int) -> None:
        self._collate, self._inputs, self._targets, self._seed = collate, inputs, targets, seed

    def of(
        self, samples: Sequence[Any], stand_in: Callable[[], Any], *, step: tuple[int, int], whole: bool
    ) -> StepBatch:
        """Make a batch; without samples it is empty, with the shapes of a batch of ``stand_in()``.

        Args:
            step: the epoch and the step in it.
            whole: whether the ranks compare all samples of the step, or its first and last one.
        """
        with seeded(self._seed, *step):
            inputs, targets = collated(samples if samples else [stand_in()], self._collate)
        checksum = batch_checksum(inputs, targets, whole=whole) if samples else None
        if not samples:
            inputs, targets = _none_of(inputs), _none_of(targets)
        return StepBatch(inputs if self._inputs else None, targets if self._targets else None, len(samples), checksum)

    def checksum(self, sample: Any) -> int:
        """A checksum of one sample, as a batch."""
        with seeded(self._seed, "checksum"):
            return batch_checksum(*collated([sample], self._collate), whole=True)


def _none_of(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor[:0], value)


def batch_checksum(inputs: Any, targets: Any, *, whole: bool) -> int:
    """A 32-bit checksum of a batch, by which ranks notice that they load different samples.

    It reads a whole batch at about a gigabyte per second.

    Args:
        inputs, targets: the batch; both are in the checksum, because no rank needs both.
        whole: whether it covers all samples, or the first and the last one.
    """
    tensors, structure = flatten((inputs, targets))
    value = zlib.crc32(repr(structure).encode())
    for tensor in tensors:
        value = zlib.crc32(repr((tensor.shape, tensor.dtype)).encode(), value)
        for part in [tensor] if whole or not tensor.dim() else [tensor[:1], tensor[-1:]]:
            value = zlib.crc32(_memory(part), value)
    return value


def _memory(tensor: Tensor) -> Any:
    """The bytes of a tensor as an array, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
