"""The link between a rank and its host's memory, over which weights come and go while the rank computes.

It has a lane in each direction. Weights of the unit in use, and then of the next one, are asked for when a turn begins;
the layers of the unit wait for theirs. Gradients leave when their unit does, after those that left before have arrived.
:mod:`runner.memory.apply.weight_swap` does the same with tensors. What stages save may use the same lanes
(:mod:`.host_link`): then that module plays a forward or backward layer by layer, and asks here for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from runner.schedule.simulation.host_link import Lanes

__all__ = ["RunTurns", "WeightLink", "WeightRun", "WeightTurn"]


class WeightTurn(NamedTuple):
    """A part of a forward or backward.

    Args:
        share: its part of the duration.
        unit: the unit that it uses; None: nothing that comes and goes.
        coming: the units that are asked for when it begins, each with the duration of its copy.
        leaving: the durations of the copies of gradients that leave then.
        layers: the layers that run in it, as indices in the whole model.
    """

    share: float
    unit: int | None
    coming: tuple[tuple[int, float], ...] = ()
    leaving: tuple[float, ...] = ()
    layers: Collection[int] = ()


class WeightRun(NamedTuple):
    """The turns of one forward or backward; gradients leave after it, and are waited for, if it is its stage's last."""

    turns: tuple[WeightTurn, ...]
    leaving: tuple[float, ...] = ()
    is_last: bool = False


class WeightLink:
    """Plays the turns of one rank.

    Args:
        runs: its forwards and backwards, by whether it is a backward, the stage and the micro-batch.
        lanes: its lanes; None: its own, which nothing else uses.

    Attributes:
        waited: the time in which forwards and backwards have waited for weights and gradients.
    """

    def __init__(self, runs: Mapping[tuple[bool, int, int], WeightRun], lanes: Lanes | None = None) -> None:
        self.waited = 0.0
        self._runs = runs
        self._lanes = lanes or Lanes()
        self._there: dict[int, float] = {}

    def run(self, key: tuple[bool, int, int], asked: float, start: float, seconds: float) -> float:
        """The end of a forward or backward.

        Args:
            key: see ``runs``.
            asked: when its first weights are asked for: when its rank is free.
            start: when it starts.
            seconds: its duration without waits.
        """
        if key not in self._runs:
            return start + seconds
        turns = self.turns(key)
        now = max(start, turns.ask(asked))
        for number, turn in enumerate(turns.run.turns):
            now = turns.take(number, now) + turn.share * seconds
        now = turns.end(now)
        self.waited += max(0.0, now - (start + seconds))
        return now

    def turns(self, key: tuple[bool, int, int]) -> RunTurns:
        """The turns of a forward or backward; see :meth:`run`."""
        return RunTurns(self._runs.get(key, WeightRun(())), self._lanes, self._there)


class RunTurns:
    """The turns of one forward or backward, one after the other.

    Args:
        run: the turns.
        lanes: the rank's lanes.
        there: when each unit is on the device; it is kept from run to run.
    """

    def __init__(self, run: WeightRun, lanes: Lanes, there: dict[int, float]) -> None:
        self.run = run
        self._lanes, self._there = lanes, there
        self._taken = 0  # turns

    def ask(self, now: float) -> float:
        """Begin the first turn; return the moment when what leaves before has left."""
        return self._begin(self.run.turns[0], now) if self.run.turns else now

    def take(self, number: int, now: float) -> float:
        """The moment when the layers of a turn can run; it follows the one that was taken before."""
        turn, self._taken = self.run.turns[number], number + 1
        if number:
            now = self._begin(turn, now)
        return now if turn.unit is None else max(now, self._there.get(turn.unit, 0.0))

    def reach(self, layer: int, now: float) -> float:
        """The moment when a layer can run; turns whose layers come before it have ended."""
        own = next((number for number, turn in enumerate(self.run.turns) if layer in turn.layers), -1)  # -1: the loss
        for number in range(self._taken, own + 1):
            now = self.take(number, now)
        return now

    def end(self, now: float) -> float:
        """The end of the run: gradients leave, and are waited for if it is the last of its stage."""
        for copying in self.run.leaving:
            now = self._leave(copying, now)
        return max(now, self._lanes.out_free) if self.run.is_last else now

    def _begin(self, turn: WeightTurn, now: float) -> float:
        for copying in turn.leaving:
            now = self._leave(copying, now)
        for unit, copying in turn.coming:
            self._there[unit] = self._lanes.carry_back(now, copying)
        return now

    def _leave(self, copying: float, now: float) -> float:
        now = max(now, self._lanes.out_free)
        self._lanes.carry_out(now, copying)
        return now
