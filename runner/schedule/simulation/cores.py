"""Plays a schedule whose ranks share fewer cores than they are."""

from __future__ import annotations

import heapq
import math

from runner.schedule.dependencies import dependencies
from runner.schedule.simulation.clock import StageCosts, durations
from runner.schedule.values import COMPUTE, Action, Op, Schedule

__all__ = ["span_on_cores"]


def span_on_cores(schedule: Schedule, costs: StageCosts, at_once: float) -> float:
    """The time from the first to the last forward or backward if only some ranks can compute at the same time.

    An action that is ready waits for a free place and keeps it to its end; of several, the one that was ready first
    goes first. Messages between ranks take their time and no place. Where ``at_once`` is no whole number, there is one
    place more for the rest, and all places are slower, so that together they are as fast as asked.

    Args:
        schedule: its compute is played, in the order of its lists.
        costs: durations of each stage with a place of its own.
        at_once: number of ranks that can compute at full speed at the same time, above 0.
    """
    return _Play(schedule, costs, at_once).to_the_end()


class _Play:
    def __init__(self, schedule: Schedule, costs: StageCosts, at_once: float) -> None:
        places = math.ceil(at_once)
        self._schedule, self._slower = schedule, places / at_once
        self._seconds = durations(costs, schedule)
        self._places = [0.0] * places  # a heap of the moments when they are free
        self._position = [0] * schedule.ranks
        self._free = [0.0] * schedule.ranks
        self._ended: dict[Action, float] = {}
        self._ready: list[tuple[float, int]] = []  # a heap of ranks by the moment when their next action is ready
        self._waiting: dict[Action, list[int]] = {}

    def to_the_end(self) -> float:
        for rank in range(self._schedule.ranks):
            self._look(rank)
        while self._ready:
            ready, rank = heapq.heappop(self._ready)
            action = self._schedule.actions[rank][self._position[rank]]
            self._ended[action] = self._free[rank] = self._end_of(action, ready)
            self._position[rank] += 1
            for each in (rank, *self._waiting.pop(action, ())):
                self._look(each)
        return max(self._free)

    def _look(self, rank: int) -> None:
        """Note when the next action of a rank is ready, or for what it waits."""
        row, cell = self._schedule.actions[rank], self._position[rank]
        if cell == len(row):
            return
        needed = dependencies(self._schedule, row[cell])
        missing = next((action for action in needed if action not in self._ended), None)
        if missing is not None:
            self._waiting.setdefault(missing, []).append(rank)
            return
        arrivals = (self._ended[action] + self._crossing(action, rank, row[cell]) for action in needed)
        heapq.heappush(self._ready, (max(self._free[rank], *arrivals, 0.0), rank))

    def _end_of(self, action: Action, ready: float) -> float:
        if action.op not in COMPUTE:
            return ready
        start = max(ready, self._places[0])
        seconds = self._seconds[action.work][action.stage] * self._schedule.size_of(action.microbatch)
        end = start + seconds * self._slower
        heapq.heapreplace(self._places, end)
        return end

    def _crossing(self, needed: Action, rank: int, action: Action) -> float:
        """The time of the message that brings what another rank has made."""
        if needed.stage == action.stage or needed.microbatch is None or action.op not in COMPUTE:
            return 0.0
        if self._schedule.rank_of(needed.stage, needed.microbatch, needed.op) == rank:
            return 0.0
        return self._seconds[Op.SEND][min(needed.stage, action.stage)]
