"""Says which weights are on the device while each layer runs, if some layers' weights are at home in the host's memory.

The unit is one or several consecutive layers whose weights come and go together. The order in which a rank uses them is
known from its schedule. So the device holds the unit in use and the next one that is not the same, and no other; what
stands in both places of a turn from forwards to backwards is not moved at all. When a unit goes, the gradients that its
backwards have added meanwhile go to the host, and at most one unit's gradients are on their way. If some of a unit's
gradients are in the host already, those of each further backward go before the next one adds to them: the host adds
them up in the order of backwards, as if nothing moved. A unit's gradients are in the host when the last backward of its
stage has ended.
:mod:`runner.memory.apply.weight_swap` moves what is listed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from runner.memory.solve.program import Step, ends, operations
from runner.memory.solve.values import Program

__all__ = ["ActionTurns", "RankTurns", "Run", "Traffic", "Turn", "WeightUnit", "rank_turns", "stage_runs"]

_HELD = 2  # units: the one in use and the next
_NOTHING_SPARED: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """Consecutive layers whose weights come and go together.

    Args:
        first, last: indices in the whole model, inclusive.
        weight_bytes: what is copied to the device.
        gradient_bytes: gradients of those that are trained; 0 if only frozen weights are moved.
        optimizer_bytes: their optimizer states, which stay in the host.
    """

    first: int
    last: int
    weight_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """What it takes on the device at most."""
        return self.weight_bytes + self.gradient_bytes

    @property
    def home_bytes(self) -> int:
        """What the device is rid of."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


class Run(NamedTuple):
    """One forward or backward of a stage, as the layers that it runs in order.

    Args:
        backward: whether it is a backward.
        stage: index of the stage.
        microbatch: the micro-batch's number in its window.
        layers: indices in the whole model; a backward may run a layer forward again.
    """

    backward: bool
    stage: int
    microbatch: int
    layers: tuple[int, ...]


class Turn(NamedTuple):
    """A part of a run, in which one unit is used, or layers that belong to none.

    Args:
        layers: the layers that run, in order.
        unit: index of the unit; None: their weights stay on the device.
        held: the units that are on the device, or on their way to it.
        device_bytes: the most that the weights and gradients of all units take on the device meanwhile.
        parts_with: whether the unit's gradients of an earlier backward go to the host first, although its weights stay.
        begins: whether the first gradients of a unit that is a single layer are made in it.
    """

    layers: tuple[int, ...]
    unit: int | None
    held: tuple[int, ...]
    device_bytes: int
    parts_with: bool = False
    begins: bool = False


class ActionTurns(NamedTuple):
    """A run with its turns.

    Args:
        run: the run.
        turns: its turns in order.
        is_last: whether it is its stage's last one, after which all gradients that are on their way are waited for.
        going_home: the units that go home when it has ended.
    """

    run: Run
    turns: tuple[Turn, ...]
    is_last: bool
    going_home: tuple[int, ...]


class Traffic(NamedTuple):
    """Bytes of one window.

    Args:
        weights: from the host to the device.
        gradients: from the device to the host.
    """

    weights: int
    gradients: int


class RankTurns(NamedTuple):
    """A window of one rank: its turns, by run in order, and the bytes that they move."""

    actions: tuple[ActionTurns, ...]
    traffic: Traffic

    def largest_bytes(self, *, backward: bool, spared: Mapping[int, int] = _NOTHING_SPARED) -> Mapping[int, int]:
        """For each layer, the most that units take on the device while it runs in a forward, or in a backward.

        Args:
            backward: which of the two.
            spared: for each layer, the bytes of its gradients that are not there yet at the peak of its backward, if
                there were none when that began.
        """
        found: dict[int, int] = {}
        for action in self.actions:
            for turn in action.turns if action.run.backward == backward else ():
                for layer in turn.layers:
                    taken = turn.device_bytes - (spared.get(layer, 0) if turn.begins else 0)
                    found[layer] = max(found.get(layer, 0), taken)
        return found

    def of_first_backwards(self) -> RankTurns:
        """The same turns, of all forwards, and of each stage's first backward alone."""
        found, seen = [], set[int]()
        for action in self.actions:
            if action.run.backward and action.run.stage in seen:
                continue
            if action.run.backward:
                seen.add(action.run.stage)
            found.append(action)
        return self._replace(actions=tuple(found))

    def turning(self, moving: Set[int]) -> RankTurns:
        """The same turns, of those backwards alone before which no other micro-batch ran forward than their own.

        Args:
            moving: the layers that save something which is moved; forwards without such layers do not count.
        """
        found, latest = [], None
        for action in self.actions:
            run = action.run
            if run.backward and run[1:3] == latest:
                found.append(action)
            elif not run.backward and not moving.isdisjoint(run.layers):
                latest = run[1:3]
        return self._replace(actions=tuple(found))


def stage_runs(program: Program, first_trained: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers of a stage in the order of its forward, and in that of its backward.

    Args:
        program: the stage's program.
        first_trained: the model's first layer with a trained weight; layers before it have no backward.
    """
    first, last = ends(program)
    forward = tuple(range(first, last + 1))
    if not isinstance(program, tuple):
        return forward, tuple(layer for layer in reversed(forward) if layer >= first_trained)
    steps = list(operations(program))[len(forward) :]
    lowest = min(
        (each.layer for each in steps if each.step is Step.BACKWARD and each.layer >= first_trained), default=0
    )
    return forward, tuple(each.layer for each in steps if each.layer >= lowest)


def rank_turns(runs: Sequence[Run], units: Sequence[WeightUnit]) -> RankTurns:
    """The turns of one rank in a window.

    Args:
        runs: its forwards and backwards in order.
        units: the units of all its stages.
    """
    unit_of = {layer: number for number, unit in enumerate(units) for layer in range(unit.first, unit.last + 1)}
    parts = [_parts(run, unit_of) for run in runs]
    uses = [unit for each in parts for _, unit in each if unit is not None]
    own = defaultdict[int, set[int]](set)  # stage -> its units
    for run in runs:
        own[run.stage] |= {unit_of[layer] for layer in run.layers if layer in unit_of}
    device, last_runs = _Device(units), {run.stage: at for at, run in enumerate(runs)}
    made, position = [], 0
    for at, (run, turns) in enumerate(zip(runs, parts, strict=True)):
        listed = []
        device.begin()
        for layers, unit in turns:
            parts_with = begins = False
            if unit is not None:
                parts_with, begins = device.use(unit, _next(uses, position), backward=run.backward)
                position += 1
            begins = begins and len(set(layers)) == 1
            listed.append(Turn(layers, unit, tuple(sorted(device.held)), device.num_bytes, parts_with, begins))
        going = tuple(sorted(device.held & own[run.stage])) if last_runs[run.stage] == at else ()
        if last_runs[run.stage] == at:
            device.send_home(set(going))
        made.append(ActionTurns(run, tuple(listed), last_runs[run.stage] == at, going))
    return RankTurns(tuple(made), Traffic(device.fetched, device.sent))


def _parts(run: Run, unit_of: Mapping[int, int]) -> list[tuple[tuple[int, ...], int | None]]:
    grouped = groupby(run.layers, unit_of.get)
    return [(tuple(layers), unit) for unit, layers in grouped]


def _next(uses: Sequence[int], position: int) -> set[int]:
    """The first units from a position on that are not the same."""
    found: set[int] = set()
    for unit in uses[position:]:
        found.add(unit)
        if len(found) == _HELD:
            break
    return found


class _Device:
    """The units that a device holds, and what it has moved so far."""

    def __init__(self, units: Sequence[WeightUnit]) -> None:
        self.held: set[int] = set()
        self.fetched = 0
        self.sent = 0
        self._units = units
        self._dirty: set[int] = set()  # with gradients
        self._earlier: set[int] = set()  # of these, the ones with gradients of earlier runs
        self._sent: set[int] = set()  # with gradients in the host
        self._leaving = 0

    @property
    def num_bytes(self) -> int:
        held = sum(self._units[number].weight_bytes for number in self.held)
        return held + sum(self._units[number].gradient_bytes for number in self._dirty) + self._leaving

    def begin(self) -> None:
        """Begin a run."""
        self._earlier = set(self._dirty)

    def use(self, unit: int, wanted: set[int], *, backward: bool) -> tuple[bool, bool]:
        """Use a unit, and have those that are wanted.

        Returns:
            whether its gradients go although it stays, and whether the use makes the first gradients of the unit.
        """
        self._send(self._dirty - wanted)
        parts_with = backward and unit in self._earlier & self._dirty & self._sent
        if parts_with:
            self._send({unit})
            self._earlier.remove(unit)
        self.fetched += sum(self._units[number].weight_bytes for number in wanted - self.held)
        self.held = wanted
        begins = backward and self._units[unit].gradient_bytes > 0 and unit not in self._dirty
        if begins:
            self._dirty.add(unit)
        return parts_with, begins

    def send_home(self, gone: set[int]) -> None:
        self._send(self._dirty & gone)
        self.held = self.held - gone
        self._leaving = 0  # somebody waits for them

    def _send(self, gone: set[int]) -> None:
        for number in sorted(gone):
            self._leaving = self._units[number].gradient_bytes
            self.sent += self._leaving
        self._dirty -= gone
        self._sent |= gone
