"""Samples to the batch that a rank hands to the engine."""

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
    """Samples of a replica to a :class:`StepBatch` with what the rank needs.

    Args:
        collate: samples to ``(input, target)``.
        inputs, targets: whether the rank has the first or the last stage.
        checked: the batch carries a checksum of its inputs, by which the ranks that load notice that theirs differ.
    """

    def __init__(self, collate: Collate, *, inputs: bool, targets: bool, checked: bool = False) -> None:
        self._collate, self._inputs, self._targets, self._checked = collate, inputs, targets, checked

    def of(self, samples: Sequence[Any], stand_in: Callable[[], Any]) -> StepBatch:
        """Without any sample, the shapes are those of a batch of ``stand_in()``."""
        inputs, targets = collated(samples if samples else [stand_in()], self._collate)
        checksum = input_checksum(inputs) if self._checked and samples else None
        if not samples:
            inputs, targets = _none_of(inputs), _none_of(targets)
        return StepBatch(inputs if self._inputs else None, targets if self._targets else None, len(samples), checksum)


def _none_of(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor[:0], value)


def input_checksum(inputs: Any) -> int:
    """Of the first and the last sample: enough to tell whether two ranks go through the data alike."""
    value = 0
    for tensor in flatten(inputs)[0]:
        ends = tensor.detach()[[0, -1]] if tensor.dim() and len(tensor) else tensor.detach()
        value = zlib.crc32(bytes(ends.contiguous().cpu().view(-1).view(torch.uint8).tolist()), value)
    return value
