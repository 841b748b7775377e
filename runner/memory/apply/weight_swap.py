"""Keeps weights at home in the host's memory, and lends them to the device while layers use them.

A weight's home is memory of the host. Between windows its tensor is there, and its gradient, so that the optimizer, its
states, checkpoints and sums over replicas are the host's, too, without knowing of it. In a window the tensor is on the
device while :mod:`runner.memory.solve.residency` says so. What autograd saves of a weight is a note of where it lies in
it, so that no graph keeps a weight on the device; the backward finds the weight by it. Gradients that backwards add
meanwhile go home with their weights, and are added to those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import Lane, Load, Pair
from runner.memory.apply.mover import Moving
from runner.memory.apply.trip import MovedStage, Trip, unpack
from runner.memory.solve.residency import ActionTurns, Turn
from runner.model.layers import Part

__all__ = ["Home", "HostWeights", "UsingWeights", "WeightSwap", "is_at_home"]

Home = Callable[[int], torch.UntypedStorage]
"""Makes memory of a number of bytes that is no device's."""

_at_home: Any = WeakTensorKeyDictionary()


def is_at_home(parameter: Tensor) -> bool:
    """Whether a parameter's home is the host's memory."""
    return parameter in _at_home


class _Note(NamedTuple):
    """What autograd keeps of a weight: which part of it."""

    unit: HostWeights
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostWeights:
    """The weights of one unit.

    Args:
        parameters: the weights; they move to their home.
        device: where they are used.
        home: makes their memory.

    Attributes:
        is_there: whether they are on the device, or on their way.
    """

    def __init__(self, parameters: Sequence[Parameter], device: torch.device, home: Home) -> None:
        self.parameters = list(parameters)
        self.is_there = False
        self._device = device
        self._homes = [_at(home, parameter) for parameter in self.parameters]
        self._lent: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._home_gradients: list[Tensor | None] = []
        self._coming: Load | None = None
        self._numbers: Mapping[int, int] = {}
        for parameter, place in zip(self.parameters, self._homes, strict=True):
            place.copy_(parameter.data)
            parameter.data = place
            _at_home[parameter] = True

    @property
    def weight_bytes(self) -> int:
        return sum(place.untyped_storage().nbytes() for place in self._homes)

    @property
    def has_gradients(self) -> bool:
        """Whether backwards have begun to add gradients on the device."""
        return bool(self._gradients)

    def claim(self) -> None:
        """Take home what other code has put elsewhere, as Lightning may between two runs."""
        for parameter, place in zip(self.parameters, self._homes, strict=True):
            if parameter.untyped_storage()._cdata != place.untyped_storage()._cdata:
                place.copy_(parameter.data)
                parameter.data = place

    def come(self, lane: Lane) -> int:
        """Begin to come to the device; return the bytes."""
        self.is_there = True
        self._lent = [
            torch.empty_strided(place.size(), place.stride(), dtype=place.dtype, device=self._device)
            for place in self._homes
        ]
        pairs = [Pair(a.untyped_storage(), b.untyped_storage()) for a, b in zip(self._homes, self._lent, strict=True)]
        self._coming = lane.carry(pairs)
        return self.weight_bytes

    def use(self) -> None:
        """Wait for the weights, and let the model use them."""
        if self._coming is None:
            return
        self._coming.use()
        self._coming = None
        self._numbers = {int(each.untyped_storage()._cdata): number for number, each in enumerate(self._lent)}
        self._home_gradients = [parameter.grad for parameter in self.parameters]
        for parameter, lent in zip(self.parameters, self._lent, strict=True):
            parameter.grad = None
            parameter.data = lent

    def add_gradients(self) -> None:
        """Let backwards add gradients on the device, beginning with zeros."""
        if self._gradients:
            return
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter.data)
                self._gradients.append(parameter.grad)

    def go(self) -> list[tuple[Tensor, Tensor]]:
        """Go home; return gradients on the device, each with the one at home to which it is to be added."""
        if self._coming is not None:  # nobody has used it
            self.use()
        gone = self.part_with_gradients()
        for parameter, place, gradient in zip(self.parameters, self._homes, self._home_gradients, strict=True):
            parameter.grad, parameter.data = None, place
            parameter.grad = gradient
        self.is_there, self._lent, self._numbers = False, [], {}
        return gone

    def part_with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Give away the gradients on the device; return each with the one at home to which it is to be added."""
        trained = [at for at, parameter in enumerate(self.parameters) if parameter.requires_grad and self._gradients]
        gone = []
        for at, gradient in zip(trained, self._gradients, strict=True):
            home = self._home_gradients[at]
            assert home is not None  # the engine has given every trained weight one
            if gradient._version:  # a backward has added to the zeros
                gone.append((gradient, home))
            self.parameters[at].grad = None
        self._gradients = []
        return gone

    def note(self, tensor: Tensor) -> Tensor | _Note:
        """What autograd keeps of a tensor that it saves."""
        tensor = tensor.detach()
        number = self._number_of(tensor)
        if number is None:
            return tensor
        return _Note(self, number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def found(self, note: _Note) -> Tensor:
        """The part of a weight that a note means; the weight is on the device."""
        made = torch.empty(0, dtype=note.dtype, device=self._device)
        return made.set_(self._lent[note.number].untyped_storage(), note.offset, note.size, note.stride)

    def _number_of(self, tensor: Tensor) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        return self._numbers.get(int(tensor.untyped_storage()._cdata))


def _at(home: Home, parameter: Parameter) -> Tensor:
    """A tensor of a parameter's form at its home."""
    like = torch.empty_like(parameter.data, device="meta")
    made = torch.empty(0, dtype=parameter.dtype)
    return made.set_(home(like.numel() * like.element_size()), 0, like.size(), like.stride())


class WeightSwap:
    """Moves the units of one rank as its turns say.

    Args:
        units: the units, by number.
        lanes: the lane out and the lane back.
        turns: gives the turns of a window, by whether it is of training and by the micro-batches that have samples.
        buffers: for gradients that have left the device and are not added yet.
        moving: see :data:`runner.memory.apply.mover.Moving`.

    Attributes:
        weights_moved, gradients_moved: bytes so far.
    """

    def __init__(
        self,
        units: Sequence[HostWeights],
        lanes: tuple[Lane, Lane],
        turns: Callable[[bool, frozenset[int]], Sequence[ActionTurns]],
        buffers: HostBuffers,
        moving: Moving = nullcontext,
    ) -> None:
        self.weights_moved = 0
        self.gradients_moved = 0
        self.buffers = buffers
        self._units = list(units)
        self._out, self._back = lanes
        self._moving = moving
        self._turns_of = turns
        self._known: dict[tuple[bool, frozenset[int]], dict[tuple[bool, int, int], ActionTurns]] = {}
        self._ahead: list[Turn] = []
        self._current: int | None = None  # the unit whose turn it is
        self._counts = True  # whether the window is of training
        self._leaving: tuple[Load, list[tuple[Tensor, Tensor]]] | None = None
        for unit in self._units:
            for parameter in unit.parameters:
                if parameter.requires_grad:
                    parameter.register_hook(_Expecting(self, unit))  # type: ignore[no-untyped-call]

    @property
    def parameters(self) -> list[Parameter]:
        """All weights that are at home."""
        return [parameter for unit in self._units for parameter in unit.parameters]

    def claim(self) -> None:
        """See :meth:`HostWeights.claim`; call it between windows."""
        for unit in self._units:
            unit.claim()

    @contextmanager
    def running(self, key: tuple[bool, int, int], *, training: bool, microbatches: frozenset[int]) -> Iterator[None]:
        """The context of a forward or backward.

        Args:
            key: whether it is a backward, the stage, and the number of the micro-batch.
            training: whether its window is of training.
            microbatches: the micro-batches of the window that have samples; the others are not computed.
        """
        action = self._turns(training, microbatches).get(key)
        self._ahead = list(action.turns) if action is not None else []
        self._current, self._counts = None, training
        if self._ahead:  # its weights may still be on their way
            self._take(self._ahead[0])
        yield
        while self._ahead:  # what the model did not use
            self._take(self._ahead.pop(0))
        if action is not None and action.is_last:
            self._go([self._units[number] for number in action.going_home])
            self._settle()

    def _turns(self, training: bool, microbatches: frozenset[int]) -> dict[tuple[bool, int, int], ActionTurns]:
        """The turns of a window, by the runs to which they belong."""
        window = training, microbatches
        if window not in self._known:
            self._known[window] = {each.run[:3]: each for each in self._turns_of(*window)}
        return self._known[window]

    def reach(self, unit: HostWeights) -> None:
        """Have a unit's weights on the device, because something uses them now."""
        number = self._units.index(unit)
        if number != self._current and any(turn.unit == number for turn in self._ahead):
            while self._current != number:
                turn = self._ahead.pop(0)
                self._take(turn)
                self._current = turn.unit
        if not unit.is_there:  # what no turn has foreseen
            self._come([unit])
        with self._moving():
            unit.use()

    def require_empty(self) -> None:
        """Check that all weights and gradients are at home.

        Raises:
            RuntimeError: some are not.
        """
        away = sum(unit.is_there for unit in self._units)
        if away or self._leaving is not None or self.buffers.in_use:
            raise RuntimeError(f"the weights of {away} units are left on the device after a window")

    def abandon(self) -> None:
        """Take all weights home after a window that has failed, and drop their gradients."""
        for unit in self._units:
            if unit.is_there:
                unit.go()
        self._settle()

    def add_gradients(self, unit: HostWeights) -> None:
        """Have room for a unit's gradients, because a backward is about to add one."""
        self.reach(unit)
        unit.add_gradients()

    def _take(self, turn: Turn) -> None:
        if turn.unit is None:
            return
        held = [self._units[number] for number in turn.held]
        self._go([unit for unit in self._units if unit.is_there and unit not in held])
        if turn.parts_with:
            self._bring_home(self._units[turn.unit].part_with_gradients())
        self._come([unit for unit in (self._units[turn.unit], *held) if not unit.is_there])

    def _come(self, units: Sequence[HostWeights]) -> None:
        with self._moving():
            for unit in units:
                if not unit.is_there:
                    self.weights_moved += unit.come(self._back) * self._counts

    def _go(self, units: Sequence[HostWeights]) -> None:
        for unit in units:
            self._bring_home(unit.go())

    def _bring_home(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        if gradients:
            self._settle()
            with self._moving():
                self._send(gradients)

    def _send(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Send gradients home; those that were sent before have been added there."""
        staged = [_staged(self.buffers, home) for _, home in gradients]
        pairs = [Pair(a.untyped_storage(), b.untyped_storage()) for (a, _), b in zip(gradients, staged, strict=True)]
        sums = [(home, place) for (_, home), place in zip(gradients, staged, strict=True)]
        self._leaving = self._out.carry(pairs), sums
        self.gradients_moved += sum(pair.source.nbytes() for pair in pairs)

    def _settle(self) -> None:
        """Wait for gradients that are on their way, and add them to those at home."""
        if self._leaving is None:
            return
        load, sums = self._leaving
        self._leaving = None
        with self._moving(), torch.no_grad():
            load.wait()
            for home, place in sums:
                home.add_(place)
                self.buffers.give_back(place.untyped_storage())


def _staged(buffers: HostBuffers, like: Tensor) -> Tensor:
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(buffers.take(like.numel() * like.element_size()), 0, like.size(), like.stride())


class _Expecting:
    """A hook that makes room for a unit's gradients before autograd adds the first."""

    def __init__(self, swap: WeightSwap, unit: HostWeights) -> None:
        self._swap, self._unit = swap, unit

    def __call__(self, gradient: Tensor) -> None:
        self._swap.add_gradients(self._unit)


class UsingWeights:
    """Wraps a part of a stage so that its weights are there when it runs.

    Args:
        swap: brings them.
        unit: the part's weights.
        part: the part; if it is computed again in the backward, it keeps no weights itself.
        stage: the trip in which what the part saves besides takes part; None: that stays on the device.
    """

    def __init__(self, swap: WeightSwap, unit: HostWeights, part: Part, stage: MovedStage | None = None) -> None:
        self._swap, self._unit, self._around, self._stage = swap, unit, part.around, stage

    def __call__(self, run: Callable[[Any], Any], value: Any, *, seeded: bool) -> Any:
        def reached(value: Any) -> Any:
            self._swap.reach(self._unit)
            return run(value)

        if self._around is not None:
            return self._around(reached, value, seeded=seeded)
        if not torch.is_grad_enabled():
            return reached(value)
        trip = self._stage.trip if self._stage is not None else None
        with saved_tensors_hooks(self._unit.note if trip is None else self._packing(trip), self._found):
            return reached(value)

    def _packing(self, trip: Trip) -> Callable[[Tensor], Any]:
        """The hook that notes weights, and hands everything else to the trip. Autograd calls the innermost hook alone.

        Args:
            trip: the trip of the forward that runs.
        """
        pack = trip.pack

        def packed(tensor: Tensor) -> Any:
            noted = self._unit.note(tensor)
            return noted if isinstance(noted, _Note) else pack(noted)

        return packed

    def _found(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Note):
            return unpack(saved)
        self._swap.reach(saved.unit)
        return saved.unit.found(saved)
