"""Makes the batch that a rank hands to the engine from samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner.engine.window import StepBatch
from runner.model.boundary import flatten, map_tensors
from runner.model.data import Collate, collated

__all__ = ["Batches", "input_checksum"]


class Batches:
    """Makes a :class:`StepBatch` from a replica's samples, with the parts that this rank needs.

    Args:
        collate: samples to ``(input, target)``.
        inputs, targets: whether the rank has the first or the last stage.
        checked: whether the batch carries a checksum of its inputs, so that ranks notice if they load different data.
    """

    def __init__(self, collate: Collate, *, inputs: bool, targets: bool, checked: bool = False) -> None:
        self._collate, self._inputs, self._targets, self._checked = collate, inputs, targets, checked

    def of(self, samples: Sequence[Any], stand_in: Callable[[], Any]) -> StepBatch:
        """Make a batch; without samples it is empty, with the shapes of a batch of ``stand_in()``."""
        inputs, targets = collated(samples if samples else [stand_in()], self._collate)
        checksum = input_checksum(inputs) if self._checked and samples else None
        if not samples:
            inputs, targets = _none_of(inputs), _none_of(targets)
        return StepBatch(inputs if self._inputs else None, targets if self._targets else None, len(samples), checksum)


def _none_of(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor[:0], value)


def input_checksum(inputs: Any) -> int:
    """Checksum of the first and the last sample: enough to notice that two ranks read the data differently."""
    value = 0
    for tensor in flatten(inputs)[0]:
        ends = tensor.detach()[[0, -1]] if tensor.dim() and len(tensor) else tensor.detach()
        value = zlib.crc32(bytes(ends.contiguous().cpu().view(-1).view(torch.uint8).tolist()), value)
    return value
