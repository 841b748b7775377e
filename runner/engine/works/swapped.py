"""Lends the device the weights that are at home in the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from runner.engine.work import Place
from runner.memory.apply.weight_swap import WeightSwap

__all__ = ["Swapped"]


class Swapped:
    """A :class:`runner.engine.work.Work` for ranks whose weights come and go.

    Args:
        swap: moves them.
    """

    def __init__(self, swap: WeightSwap) -> None:
        self._swap = swap

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        return self._running(place, backward=False)

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        return self._running(place, backward=True)

    def _running(self, place: Place, *, backward: bool) -> AbstractContextManager[Any]:
        key, window = (backward, place.stage, place.number), place.window
        return self._swap.running(key, training=window.training, microbatches=window.computed)
