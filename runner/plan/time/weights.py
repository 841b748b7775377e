"""The time in which ranks fetch weights from their host's memory, and send gradients there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.memory.solve.residency import ActionTurns, RankTurns, WeightUnit
from runner.profile import LayerProfile, ModelProfile
from runner.schedule.simulation.host_link import shares
from runner.schedule.simulation.weight_link import WeightRun, WeightTurn

__all__ = ["weight_runs"]

Key = tuple[bool, int, int]


def weight_runs(
    turns: Sequence[RankTurns],
    units: Sequence[Sequence[WeightUnit]],
    profile: ModelProfile,
    copy_seconds: Callable[[float], float],
) -> tuple[dict[Key, WeightRun], ...]:
    """For each rank the turns of its forwards and backwards with their durations; empty if no weights move.

    Args:
        turns: when units are on the device, by rank.
        units: the units of each rank.
        profile: tells what parts of a stage's time its layers take.
        copy_seconds: the seconds that a number of bytes takes to the host's memory, or back.
    """
    return tuple(
        _Rank(own, profile.layers, copy_seconds).runs(each.actions) for each, own in zip(turns, units, strict=True)
    )


class _Rank:
    def __init__(
        self, units: Sequence[WeightUnit], layers: Sequence[LayerProfile], copy_seconds: Callable[[float], float]
    ) -> None:
        self._units, self._layers, self._copy_seconds = units, layers, copy_seconds
        self._held: set[int] = set()
        self._dirty: set[int] = set()

    def runs(self, actions: Sequence[ActionTurns]) -> dict[Key, WeightRun]:
        return {action.run[:3]: self._run(action) for action in actions}

    def _run(self, action: ActionTurns) -> WeightRun:
        backward = action.run.backward
        seconds = [sum(self._seconds(layer, backward) for layer in turn.layers) for turn in action.turns]
        turns = []
        for turn, share in zip(action.turns, shares(seconds), strict=True):
            held = set(turn.held) if turn.unit is not None else self._held
            leaving = self._leave(self._held - held)
            if turn.parts_with and turn.unit is not None:
                leaving += self._leave({turn.unit})
            order = sorted(held - self._held, key=lambda number: number != turn.unit)
            coming = tuple((number, self._copy_seconds(self._units[number].weight_bytes)) for number in order)
            self._held = held
            if backward and turn.unit is not None:
                self._dirty.add(turn.unit)
            turns.append(WeightTurn(share, turn.unit, coming, leaving, turn.layers))
        last = self._leave(set(action.going_home))
        self._held = self._held - set(action.going_home)
        return WeightRun(tuple(turns), last, action.is_last)

    def _leave(self, gone: set[int]) -> tuple[float, ...]:
        leaving = sorted(number for number in gone & self._dirty if self._units[number].gradient_bytes)
        self._dirty -= gone
        return tuple(self._copy_seconds(self._units[number].gradient_bytes) for number in leaving)

    def _seconds(self, layer: int, backward: bool) -> float:
        row = self._layers[layer]
        return row.backward_seconds if backward else row.forward_seconds
