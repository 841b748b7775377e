"""The link between a rank and its host's memory: stages move tensors out after forwards, and back for backwards.

It has a lane in each direction, and each lane carries one layer's tensors after the other. A layer gives its tensors
away as soon as it has run forward, and its backward waits for them. :mod:`runner.moved_loads` says in which order they
leave and come back; the room on the way out is what the largest layer of the rank moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.moved_loads import Leaving, Returning

__all__ = ["HostLink", "Lanes", "StageMoves", "WeightTurns", "shares"]


@dataclass(slots=True)
class Lanes:
    """The lanes between a rank and its host's memory: the moments from which each of them is free."""

    out_free: float = 0.0
    back_free: float = 0.0

    def carry_out(self, now: float, copying: float) -> float:
        """The moment when something has left that is sent now, and takes ``copying``."""
        self.out_free = max(now, self.out_free) + copying
        return self.out_free

    def carry_back(self, now: float, copying: float) -> float:
        """The moment when something is there that is asked for now, and takes ``copying``."""
        self.back_free = max(now, self.back_free) + copying
        return self.back_free


class WeightTurns(Protocol):
    """The weights that a forward or backward needs, which come over the same lanes; moments as in :class:`HostLink`."""

    def ask(self, now: float) -> float:
        """Ask for the first weights; return the moment when what leaves before has left."""
        ...

    def reach(self, layer: int, now: float) -> float:
        """The moment when a layer, an index in the whole model, has its weights."""
        ...

    def end(self, now: float) -> float:
        """The end of the run, if its last layer ends now."""
        ...


@dataclass(frozen=True, slots=True)
class StageMoves:
    """What a stage moves of one micro-batch; tuples are by layer, first to last.

    Args:
        forward, backward: each layer's share of the stage's forward and backward; each sums to 1.
        sizes: bytes that the layer moves in one direction; 0 if it moves nothing.
        copying: duration of moving them.
        one_by_one: the layers that give their tensors away only when all that was sent before has left, and get them
            back only when all that came back before has been used.
        needs: for each layer, the distances of the layers whose moved tensors its backward reads: 0 is the layer
            itself, 1 the one before it. Empty: each layer reads its own.
        first: the index of its first layer in the whole model.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sizes: tuple[float, ...]
    copying: tuple[float, ...]
    one_by_one: frozenset[int] = frozenset()
    needs: tuple[tuple[int, ...], ...] = ()
    first: int = 0

    def needed(self, layer: int) -> list[int]:
        """The layers of this stage whose moved tensors a layer's backward reads, itself first."""
        distances = sorted({0, *self.needs[layer]}) if self.needs else [0]
        return [layer - distance for distance in distances if distance <= layer and self.sizes[layer - distance]]

    @property
    def largest(self) -> float:
        """The bytes of the layer that moves most."""
        return max(self.sizes, default=0.0)


class HostLink:
    """Plays the moves of one rank.

    Args:
        stages: what the rank's stages move.
        lanes: its lanes; None: its own, which nothing else uses.

    Attributes:
        waited: the time in which forwards and backwards have waited for moves.
    """

    def __init__(self, stages: Sequence[StageMoves], lanes: Lanes | None = None) -> None:
        self.waited = 0.0
        self._lanes = lanes or Lanes()
        self._leaving = Leaving[float](max((stage.largest for stage in stages), default=0.0))  # of moments
        self._left: dict[tuple[int, int | None], list[float]] = {}  # stage and micro-batch -> moments, by layer

    def forward(
        self,
        of: tuple[int, int | None],
        moves: StageMoves,
        asked: float,
        start: float,
        seconds: float,
        turns: WeightTurns | None = None,
    ) -> float:
        """The end of a forward.

        Args:
            of: its stage and micro-batch.
            moves: what the stage moves.
            asked: when its first weights are asked for: when its rank is free.
            start: when it starts.
            seconds: its duration without waits.
            turns: the weights that come for it; None: all are there.
        """
        now, left = start if turns is None else max(start, turns.ask(asked)), []
        for at, (share, size, copying) in enumerate(zip(moves.forward, moves.sizes, moves.copying, strict=True)):
            if turns is not None:
                now = turns.reach(moves.first + at, now)
            now += share * seconds
            if size:
                now = max([now, *self._leaving.make_room(size, one_by_one=at in moves.one_by_one)])
                self._leaving.send(self._lanes.carry_out(now, copying), size)
            left.append(self._lanes.out_free)
        self._left[of] = left
        return self._ended(now if turns is None else turns.end(now), start + seconds)

    def backward(
        self,
        of: tuple[int, int | None],
        moves: StageMoves,
        asked: float,
        start: float,
        seconds: float,
        turns: WeightTurns | None = None,
        *,
        all_at_once: bool,
    ) -> float:
        """The end of a backward, or of its first part if it is split.

        Args:
            of, moves, start, seconds, turns: what they are for :meth:`forward`.
            asked: when the first tensors and weights are asked for: when its rank is free.
            all_at_once: whether it needs all tensors before it begins, because it is split.
        """
        fetching = _Fetching(moves, self._left.pop(of), self._lanes, all_at_once=all_at_once)
        fetching.ask(asked)
        now = max(start, self._lanes.back_free) if all_at_once else start
        if turns is not None:
            now = max(now, turns.ask(asked))
        for layer in reversed(range(len(moves.sizes))):
            if turns is not None:
                now = turns.reach(moves.first + layer, now)
            now = fetching.use(layer, now) + moves.backward[layer] * seconds
        return self._ended(now if turns is None else turns.end(now), start + seconds)

    def _ended(self, now: float, without_waits: float) -> float:
        self.waited += max(0.0, now - without_waits)
        return now


class _Fetching:
    """Brings back what one stage has moved of one micro-batch, last layer first.

    Args:
        left: for each layer, when its tensors have left.
        lanes: the rank's lanes.
        all_at_once: whether it asks for everything at once.
    """

    def __init__(self, moves: StageMoves, left: Sequence[float], lanes: Lanes, *, all_at_once: bool) -> None:
        self._lanes = lanes
        self._moves, self._left, self._all_at_once = moves, left, all_at_once
        sizes = {layer: size for layer, size in enumerate(moves.sizes) if size}
        self._returning = Returning(sizes, moves.one_by_one)
        self._there: dict[int, float] = {}

    def ask(self, now: float) -> None:
        """Ask for as many layers' tensors as there is room for, at least for one that is needed next."""
        for layer in self._returning.ahead(all_at_once=self._all_at_once):
            self._fetch(layer, now)

    def use(self, layer: int, now: float) -> float:
        """The moment when a layer's backward can begin."""
        for needed in self._moves.needed(layer):
            if self._returning.is_away(needed):
                self._fetch(needed, now)
            if self._returning.use(needed):
                now = max(now, self._there[needed])
                self.ask(now)
        return now

    def _fetch(self, layer: int, now: float) -> None:
        self._there[layer] = self._lanes.carry_back(max(now, self._left[layer]), self._moves.copying[layer])


def shares(seconds: Sequence[float]) -> tuple[float, ...]:
    """Each duration divided by their sum; if all are 0, equal shares."""
    whole = sum(seconds)
    return tuple(each / whole if whole else 1 / len(seconds) for each in seconds)
