"""Moves what a stage saves to the host's memory between its forward and its backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from runner.engine.context import RankContext
from runner.engine.work import NOTHING, Place
from runner.memory.apply.install import StageOffload
from runner.memory.apply.trip import Trip
from runner.model.boundary import flatten
from runner.schedule.values import Op

__all__ = ["Offloaded"]


class Offloaded:
    """A :class:`runner.engine.work.Work` for stages with moved segments.

    Args:
        rank: the rank's context.
        offload: the rank's mover and the stages that it serves.
    """

    def __init__(self, rank: RankContext, offload: StageOffload) -> None:
        self._rank = rank
        self._offload = offload
        actions = (action for row in rank.schedules[True].actions for action in row)
        self._split = {action.stage for action in actions if action.op is Op.I}

    def forward(self, place: Place, value: Any, *, keeps: bool) -> AbstractContextManager[Any]:
        """Begin a trip for what autograd saves; weights, buffers and the stage's input stay."""
        module = self._rank.stages[place.stage]
        moved = self._offload.stages.get(module)
        if not keeps or moved is None:
            return NOTHING
        trip = Trip(self._offload.mover, [*module.parameters(), *module.buffers(), *flatten(value)[0]])
        self._rank.buffers.put("trip", place.stage, place.microbatch, trip)
        return moved.on(trip)

    def backward(self, place: Place) -> AbstractContextManager[Any]:
        """Begin to fetch, before the rank waits for the gradients of the stage's output."""
        if self._rank.stages[place.stage] in self._offload.stages:
            trip: Trip = self._rank.buffers.take("trip", place.stage, place.microbatch)
            trip.expect_backward(all_at_once=place.stage in self._split)
        return NOTHING
