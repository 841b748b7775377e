"""Runs forwards and backwards with the weights that their micro-batch reads: older versions, or predicted ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from runner.engine.weights.store import StageWeights
from runner.engine.work import NOTHING, Place

__all__ = ["Versioned"]


class Versioned:
    """A :class:`runner.engine.work.Work` for stages that do not always use their newest weights.

    Args:
        stores: the weights of the stages whose weights change between a forward and its backward, or are predicted.
    """

    def __init__(self, stores: Mapping[int, StageWeights]) -> None:
        self._stores = stores

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        return self._leased(place, backward=False)

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Lease weights for a backward too, because it may run layers again (activation checkpoints)."""
        return self._leased(place, backward=True)

    def _leased(self, place: Place, *, backward: bool) -> AbstractContextManager[Any]:
        store = self._stores.get(place.stage) if place.window.training else None
        return NOTHING if store is None else store.leased(place.window.step, place.number, backward=backward)
