"""Lets the saved tensors of a forward leave the rank before their backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from runner.engine.actions.messages import Incoming
from runner.engine.actions.saved_tensors import Stash
from runner.engine.context import RankContext
from runner.engine.work import NOTHING, Place
from runner.model.boundary import flatten

__all__ = ["Lent"]


class Lent:
    """A :class:`runner.engine.work.Work` for schedules that move activations to other ranks.

    Args:
        rank: the rank's context, whose schedule says which saved tensors leave.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Keep what autograd saves in a form that can leave; weights and the step's batch do not leave."""
        if not keeps or not self._leaves(place):
            return NOTHING
        module = self._rank.stages[place.stage]
        batch = flatten(value)[0] if place.stage == 0 else []
        stash = Stash([*module.parameters(), *module.buffers(), *batch])
        self._rank.buffers.put("stash", place.stage, place.microbatch, stash)
        return saved_tensors_hooks(stash.pack, stash.unpack)

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        return self._returned(place) if self._leaves(place) else NOTHING

    @contextmanager
    def _returned(self, place: Place) -> Iterator[None]:
        """Bring all saved tensors back before the backward begins."""
        incoming: Incoming = self._rank.buffers.take("returned", place.stage, place.microbatch)
        incoming.wait(self._rank.timeline)
        self._rank.buffers.take("stash", place.stage, place.microbatch).come_back(incoming.tensors)
        del incoming  # the backward drops each tensor once it is used
        yield

    def _leaves(self, place: Place) -> bool:
        schedule = self._rank.schedules[place.window.training]
        return schedule.host_of(place.stage, place.number) is not None
