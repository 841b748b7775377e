"""Adds up what the device holds of tensors on their way to the host's memory and back, as a rank works.

:mod:`runner.moved_loads` says in which order loads leave and come back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from runner.moved_loads import Leaving, Returning
from runner.profile import LayerMoves

__all__ = ["MovedLayer", "OnTheWay"]

Trip = tuple[int, int | None]
"""A stage and a micro-batch."""


class MovedLayer(NamedTuple):
    """A layer, or the loss, of a stage that moves saved tensors to the host's memory.

    Args:
        moves: what it moves of one micro-batch; may be nothing.
        forward_seconds, backward_seconds: its share of the stage's.
        forward_peak_bytes: largest increase while it runs over what was alive when the stage's forward started, if
            nothing was on its way.
        backward_peak_bytes: the same for the backward, if nothing had come back; of a stage's first layer, also when
            the stage's backward has ended.
        input_backward_peak_bytes: the same for the first part of a backward in two parts, if all had come back; None =
            not known, at most that of the whole backward with all that comes back.
        asking_bytes: like ``backward_peak_bytes``, when it asks for the first tensor that has been moved; 0 = its
            beginning is not a moment of its own.
    """

    moves: LayerMoves
    forward_seconds: float
    backward_seconds: float
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    input_backward_peak_bytes: int | None = None
    asking_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """What it moves, in one direction."""
        return self.moves.num_bytes


class _Load(NamedTuple):
    """What a layer has sent to the host."""

    of: Trip
    layer: int
    moves: LayerMoves


class OnTheWay:
    """What is on its way between a rank and its host's memory.

    Args:
        room: the most bytes on their way out at once; what is larger goes alone.
    """

    def __init__(self, room: int) -> None:
        self._leaving = Leaving[_Load](room)

    @property
    def leaving_bytes(self) -> int:
        """What the device holds only because it has not left yet."""
        return sum(load.moves.freed_bytes for load in self._leaving)

    def forward(self, of: Trip, layers: Sequence[MovedLayer]) -> int:
        """The largest increase during a forward over what is alive without moves, with all that is on its way.

        Args:
            of: its stage and micro-batch.
            layers: the stage's layers, in order.
        """
        moments = self.forward_moments(of, layers)
        return max((layers[at].forward_peak_bytes + sum(held.values()) for at, held in moments), default=0)

    def forward_moments(self, of: Trip, layers: Sequence[MovedLayer]) -> Iterator[tuple[int, dict[Hashable, int]]]:
        """Yield each layer of a forward with the bytes that are there only because they have not left yet.

        Args:
            of, layers: what they are for :meth:`forward`.
        """
        unsent = list[_Load]()
        for at, layer in enumerate(layers):
            there = {load.layer for load in (*self._leaving, *unsent) if load.of == of}
            yield (
                at,
                {
                    **{("leaving", load.of, load.layer): load.moves.freed_bytes for load in (*self._leaving, *unsent)},
                    **{("entering", of, at - d): size for d, size in layer.moves.entering if 0 <= at - d not in there},
                },
            )
            if layer.num_bytes:
                unsent.append(_Load(of, at, layer.moves))
            for load in [each for each in unsent if each.layer + each.moves.sent_after <= at]:
                unsent.remove(load)
                self._send(load)

    def backward(self, of: Trip, layers: Sequence[MovedLayer]) -> int:
        """The same for a backward.

        Args:
            of, layers: what they are for :meth:`forward`.
        """
        alone = {at: layer.backward_peak_bytes for at, layer in enumerate(layers)}
        return max(alone.get(at, 0) + sum(held.values()) for at, held in self.backward_moments(of, layers))

    def backward_moments(self, of: Trip, layers: Sequence[MovedLayer]) -> Iterator[tuple[int, dict[Hashable, int]]]:
        """Yield the beginning of a backward, as layer ``len(layers)``, and its layers, with the bytes that are on their
        way out or have come back.

        The first layer that needs what was moved frees what is on its way out, and what it has made before is there
        together with that: this moment is yielded as one of the beginning.

        Args:
            of, layers: what they are for :meth:`forward`.
        """
        back, first = _Back(layers), _first_to_ask(layers)

        def held() -> dict[Hashable, int]:
            return {
                **{("leaving", load.of, load.layer): load.moves.freed_bytes for load in self._leaving},
                **{("back", of, layer): size for layer, size in back.held.items()},
            }

        yield len(layers), held()
        for at in reversed(range(len(layers))):
            if at == first and layers[at].asking_bytes:
                yield len(layers), {**held(), ("asking", of, at): layers[at].asking_bytes}
            for distance in layers[at].moves.needs:
                if back.use(at - distance):
                    self._has_left(of, at - distance)
            yield at, held()
            back.forget(at)

    def split_backward(self, of: Trip, layers: Sequence[MovedLayer], peak_bytes: int) -> int:
        """The same for the first part of a backward in two parts, which fetches everything at its beginning.

        Args:
            of, layers: what they are for :meth:`forward`.
            peak_bytes: the largest increase with what is fetched, if nothing is on its way out.
        """
        fetched = sum(layer.num_bytes for layer in layers)
        peak = fetched + self.leaving_bytes
        for layer in reversed(layers):
            if any(layer.moves.needs) or layer.num_bytes:
                break  # what it uses has left, and what was sent before as well
            known = layer.input_backward_peak_bytes
            own = layer.backward_peak_bytes + fetched if known is None else known
            peak = max(peak, own + self.leaving_bytes)
        for at in range(len(layers)):
            self._has_left(of, at)
        return max(peak, peak_bytes + self.leaving_bytes)

    def _send(self, load: _Load) -> None:
        list(self._leaving.make_room(load.moves.num_bytes, one_by_one=load.moves.one_by_one))
        self._leaving.send(load, load.moves.num_bytes)

    def _has_left(self, of: Trip, layer: int) -> None:
        """Note that a load and those before it have left."""
        list(self._leaving.until(lambda load: (load.of, load.layer) == (of, layer)))


def _first_to_ask(layers: Sequence[MovedLayer]) -> int:
    """The layer that is the first in a backward to ask for something that was moved; -1 if nothing was.

    What a layer of another stage has moved is not this stage's.
    """
    moved = {at for at, layer in enumerate(layers) if layer.num_bytes}
    asking = (at for at, layer in enumerate(layers) if any(at - distance in moved for distance in layer.moves.needs))
    return max(asking, default=-1)


class _Back:
    """The bytes that the device holds of what has come back of one trip.

    Args:
        layers: the stage's layers.
    """

    def __init__(self, layers: Sequence[MovedLayer]) -> None:
        self._sizes = {at: layer.num_bytes for at, layer in enumerate(layers) if layer.num_bytes}
        one_by_one = {at for at, layer in enumerate(layers) if layer.moves.one_by_one}
        self._returning = Returning(self._sizes, one_by_one)
        self.held: dict[int, int] = {}
        self._fetch_ahead()

    def use(self, layer: int) -> bool:
        """Use what a layer has moved; return whether this is its first use."""
        if not self._returning.use(layer):
            return False
        self.held[layer] = self._sizes[layer]
        self._fetch_ahead()
        return True

    def forget(self, layer: int) -> None:
        """Note that a layer's backward is over."""
        self.held.pop(layer, None)

    def _fetch_ahead(self) -> None:
        self.held |= {layer: self._sizes[layer] for layer in self._returning.ahead()}
