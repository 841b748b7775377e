"""Runs forwards and backwards with the version of the weights that their micro-batch reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from runner.engine.weights.store import WeightStore
from runner.engine.works.work import NOTHING, Place

__all__ = ["Versioned"]


class Versioned:
    """A :class:`runner.engine.works.work.Work` for stages with several versions of their weights.

    Args:
        stores: the weight stores of the stages whose weights change between a forward and its backward.
    """

    def __init__(self, stores: Mapping[int, WeightStore]) -> None:
        self._stores = stores

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        return self.backward(place)

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Use the forward's weights in its backward too, which may run layers again (activation checkpoints)."""
        store = self._stores.get(place.stage) if place.window.training else None
        return NOTHING if store is None else store.leased(place.window.step, place.number)
