"""Finds for each layer of a stage whether what it saves is kept, moved to the host's memory, or made again.

Of a few layers every program is compared, by the plan's own price, except those that a bound shows to be no better than
another: what a program keeps takes memory for each micro-batch in flight, what it runs again takes the seconds of its
forwards, and what it moves takes the seconds of its copies, one after the other. So no program that was left out is
faster in the same memory. A longer stage is divided into a few groups of layers, and then looked at layer by layer
around what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, product
from typing import NamedTuple

from runner.memory.solve.offload import Offers
from runner.memory.solve.second_run import recomputation
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.values import ChainProgram, Price, Segment, StageChain

__all__ = ["EXACT", "Way", "each_layer", "program_of"]

EXACT = 8
"""The most layers of which every program is compared."""

_GROUPS = 6  # groups of the layers of a longer stage
_AROUND = 400  # programs at most that are priced layer by layer
_ROUNDING = 1e-9  # as a part of the seconds: sums of the same numbers in another order differ by less


class Way(IntEnum):
    """What happens to what a layer saves."""

    KEPT = 0
    MOVED = 1
    AGAIN = 2


Ways = tuple[Way, ...]
"""A way for each layer of a stage."""


def each_layer(name: str) -> Offers:
    """What a strategy offers that decides layer by layer.

    Args:
        name: the strategy's name.
    """

    def offers(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
        search = _Search(chain)
        search.compare(_grouped(chain))
        if len(chain.layers) > EXACT:
            search.look_around()
            yield from _renamed(name, chain, program)
        for ways in search.front:
            yield Candidate(f"{name} of {_told(ways)}", program_of(chain.first, ways))

    return offers


def program_of(first: int, ways: Iterable[Way]) -> ChainProgram:
    """The program in which each layer goes its way.

    Args:
        first: the stage's first layer, as an index in the whole model.
        ways: the ways of its layers, in order.
    """
    return tuple(
        Segment(at, at, recompute=way is Way.AGAIN, moved=way is Way.MOVED) for at, way in enumerate(ways, start=first)
    )


def _renamed(name: str, chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    """What ``pofo`` offers: for a long stage, it has programs of several layers that are run again together."""
    from runner.memory.solve.offloads.pofo import OFFLOAD as POFO  # its package imports this module

    assert POFO.candidates is not None  # it chooses among some
    for each in POFO.candidates(chain, program):
        yield Candidate(f"{name} with {each.name}", each.program)


def _told(ways: Ways) -> str:
    return f"{ways.count(Way.MOVED)} moved and {ways.count(Way.AGAIN)} again"


class _Bound(NamedTuple):
    """A price that no program of some ways goes below."""

    seconds: float
    moved_bytes: int
    peak_bytes: int
    ways: Ways


class _Layer(NamedTuple):
    """What is certain of a layer.

    Args:
        kept_bytes: what it alone saves, without tensors that pass between layers, which others may hold as well.
        backward_bytes: the least that its backward needs beside what earlier layers keep, by the way of the layer.
        copying: seconds to move ``kept_bytes`` in one direction.
        again: seconds of its second forward.
    """

    kept_bytes: int
    backward_bytes: tuple[int, int, int]
    copying: float
    again: float


class _Search:
    """Compares programs of one stage.

    Args:
        chain: the stage; its price must be known.

    Attributes:
        front: the ways to which no others are found that are equal or better in all that a choice looks at.
    """

    def __init__(self, chain: StageChain) -> None:
        assert chain.price is not None
        self.front: dict[Ways, Price] = {}
        self._chain, self._price = chain, chain.price
        self._tried: set[Ways] = set()
        self._layers = _certain(chain)
        loss = chain.loss
        rows = [*chain.layers, *([loss] if loss is not None else [])]
        self._seconds = sum(row.forward_seconds + row.backward_seconds for row in rows)

    def compare(self, groups: Sequence[range]) -> None:
        """Compare every program in which the layers of a group go the same way."""
        bounds = [self._bound(_spread(groups, ways)) for ways in product(Way, repeat=len(groups))]
        for bound in sorted(bounds):
            self._try(bound)

    def look_around(self) -> None:
        """Compare programs in which one layer goes another way than in one of the front, as long as that finds any."""
        asked, most = set[Ways](), len(self._tried) + _AROUND
        while new := [ways for ways in self.front if ways not in asked]:
            asked.update(new)
            near = {other for ways in new for other in _neighbours(ways)}
            for bound in sorted(map(self._bound, near)):
                if len(self._tried) == most:
                    return
                self._try(bound)

    def _try(self, bound: _Bound) -> None:
        if bound.ways in self._tried or any(_beats(price, bound) for price in self.front.values()):
            return
        self._tried.add(bound.ways)
        price = self._price(program_of(self._chain.first, bound.ways))
        exact = _Bound(price.seconds, price.moved_bytes, price.peak_bytes, bound.ways)
        if not any(_beats(other, exact) for other in self.front.values()):
            self.front[bound.ways] = price

    def _bound(self, ways: Ways) -> _Bound:
        """The least that a program of these ways can cost."""
        layers = list(zip(ways, self._layers, strict=True))
        moved = [layer for way, layer in layers if way is Way.MOVED]
        again = sum(layer.again for way, layer in layers if way is Way.AGAIN)
        seconds = max(self._seconds + again, sum(layer.copying for layer in moved))
        return _Bound(
            seconds * (1 - _ROUNDING),
            sum(layer.kept_bytes for layer in moved),
            self._least_bytes(layers),
            ways,
        )

    def _least_bytes(self, layers: Sequence[tuple[Way, _Layer]]) -> int:
        """The least that is alive when the layer that needs most runs backward, with all micro-batches in flight."""
        kept = most = ahead = 0
        for way, layer in layers:
            most = max(most, kept + ahead + layer.backward_bytes[way])
            kept += layer.kept_bytes if way is Way.KEPT else 0
            ahead = layer.kept_bytes if way is Way.MOVED else ahead  # it comes back ahead of its own use
        return (self._chain.in_flight - 1) * kept + max(most, kept)


def _beats(price: Price, bound: _Bound) -> bool:
    """Whether a choice would prefer a program of this price to any with the bound, under every budget."""
    if price.peak_bytes > bound.peak_bytes:
        return False
    faster = price.seconds < bound.seconds * (1 - _ROUNDING)
    return faster or (price.seconds <= bound.seconds and price.moved_bytes <= bound.moved_bytes)


def _certain(chain: StageChain) -> list[_Layer]:
    before = chain.profile.layers[chain.first - 1] if chain.first else None
    tensors = StageTensors(before, chain.layers)
    copy: Callable[[float], float] = chain.copy_seconds
    found = []
    for at, layer in enumerate(chain.layers):
        own, made_again = layer.saved_bytes - tensors.made_bytes(at), recomputation(layer, None)
        running = own + min(layer.backward_transient_bytes, layer.inner_backward_bytes)
        second = made_again.recomputed_bytes - made_again.released_bytes - tensors.made_bytes(at)
        share = made_again.recomputed_flops / layer.forward_flops if layer.forward_flops else 1.0
        backward = running, running, max(0, second)
        found.append(_Layer(own, backward, copy(own) if own else 0.0, layer.forward_seconds * share))
    return found


def _grouped(chain: StageChain) -> list[range]:
    """The layers, counted from the stage's first: each alone, or, if they are many, groups that save about as much."""
    count = len(chain.layers)
    if count <= EXACT:
        return [range(at, at + 1) for at in range(count)]
    so_far = list(accumulate(layer.saved_bytes for layer in chain.layers))
    part = so_far[-1] / _GROUPS or 1.0
    ends = sorted({min(range(count), key=lambda at: abs(so_far[at] - part * number)) for number in range(1, _GROUPS)})
    starts = [0, *(end + 1 for end in ends if end + 1 < count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


def _spread(groups: Sequence[range], ways: Sequence[Way]) -> Ways:
    return tuple(way for group, way in zip(groups, ways, strict=True) for _ in group)


def _neighbours(ways: Ways) -> Iterator[Ways]:
    for at, own in enumerate(ways):
        yield from ((*ways[:at], other, *ways[at + 1 :]) for other in Way if other is not own)
