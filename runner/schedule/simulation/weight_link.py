"""The link between a rank and its host's memory, over which weights come and go while the rank computes.

It has a lane in each direction. Weights of the unit in use, and then of the next one, are asked for when a turn begins;
the layers of the unit wait for theirs. Gradients leave when their unit does, after those that left before have arrived.
:mod:`runner.memory.apply.weight_swap` does the same with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["WeightLink", "WeightRun", "WeightTurn"]


class WeightTurn(NamedTuple):
    """A part of a forward or backward.

    Args:
        share: its part of the duration.
        unit: the unit that it uses; None: nothing that comes and goes.
        coming: the units that are asked for when it begins, each with the duration of its copy.
        leaving: the durations of the copies of gradients that leave then.
    """

    share: float
    unit: int | None
    coming: tuple[tuple[int, float], ...] = ()
    leaving: tuple[float, ...] = ()


class WeightRun(NamedTuple):
    """The turns of one forward or backward; gradients leave after it, and are waited for, if it is its stage's last."""

    turns: tuple[WeightTurn, ...]
    leaving: tuple[float, ...] = ()
    is_last: bool = False


class WeightLink:
    """Plays the turns of one rank.

    Args:
        runs: its forwards and backwards, by whether it is a backward, the stage and the micro-batch.

    Attributes:
        waited: the time in which forwards and backwards have waited for weights and gradients.
    """

    def __init__(self, runs: Mapping[tuple[bool, int, int], WeightRun]) -> None:
        self.waited = 0.0
        self._runs = runs
        self._back_free = self._out_free = 0.0
        self._there: dict[int, float] = {}

    def run(self, key: tuple[bool, int, int], asked: float, start: float, seconds: float) -> float:
        """The end of a forward or backward.

        Args:
            key: see ``runs``.
            asked: when its first weights are asked for: when its rank is free.
            start: when it starts.
            seconds: its duration without waits.
        """
        run = self._runs.get(key)
        if run is None:
            return start + seconds
        now = asked
        for turn in run.turns:
            now = self._begun(turn, now)
            if turn is run.turns[0]:
                now = max(now, start)
            if turn.unit is not None:
                now = max(now, self._there.get(turn.unit, 0.0))
            now += turn.share * seconds
        for copying in run.leaving:
            now = self._leave(copying, now)
        if run.is_last:
            now = max(now, self._out_free)
        self.waited += max(0.0, now - (start + seconds))
        return now

    def _begun(self, turn: WeightTurn, now: float) -> float:
        for copying in turn.leaving:
            now = self._leave(copying, now)
        for unit, copying in turn.coming:
            self._back_free = self._there[unit] = max(now, self._back_free) + copying
        return now

    def _leave(self, copying: float, now: float) -> float:
        now = max(now, self._out_free)
        self._out_free = now + copying
        return now
