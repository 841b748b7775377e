"""The offload strategy that finds by a genetic search which layers move what they save, and which are run again.

An individual says for each layer whether what it saves is kept, moved, moved one by one, or computed again. Two parents
give a child the first layers of one and the other layers of the other; then some layers change at random. What a child
costs is played exactly: bytes and seconds are those by which the plan chooses. The search keeps every individual to
which no other one is equal or better in memory, seconds and moved bytes, so that one search serves every budget.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import product

from runner.memory.solve.offload import Offload, move_all
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, Price, Segment, StageChain

__all__ = ["OFFLOAD"]

_CHILDREN = 250


class _Gene(IntEnum):
    KEPT = 0
    MOVED = 1
    ONE_BY_ONE = 2
    AGAIN = 3


_Individual = tuple[_Gene, ...]


class _Search:
    """The search for programs of one stage.

    Args:
        chain: the stage; its price must be known.
    """

    def __init__(self, chain: StageChain) -> None:
        assert chain.price is not None
        self._first, self._price = chain.first, chain.price
        self._tried: set[_Individual] = set()
        self._front: dict[_Individual, Price] = {}
        self._chance = random.Random(0)  # the same search for the same stage
        self._count = len(chain.layers)

    def best(self) -> list[_Individual]:
        """The individuals that the search keeps."""
        for individual in self._seeds():
            self._try(individual)
        if len(_Gene) ** self._count <= _CHILDREN:
            for genes in product(_Gene, repeat=self._count):
                self._try(genes)
            return list(self._front)
        for _ in range(_CHILDREN):
            self._try(self._child(list(self._front)))
        return list(self._front)

    def _seeds(self) -> Iterator[_Individual]:
        """The first layers moved, one by one, or run again; none to all."""
        for gene in (_Gene.MOVED, _Gene.ONE_BY_ONE, _Gene.AGAIN):
            for first in range(self._count + 1):
                yield (gene,) * first + (_Gene.KEPT,) * (self._count - first)

    def _child(self, parents: Sequence[_Individual]) -> _Individual:
        chance = self._chance
        one, other = chance.choice(parents), chance.choice(parents)
        cut = chance.randrange(self._count + 1)
        genes = [*one[:cut], *other[cut:]]
        for at in range(self._count):
            if chance.random() < 1 / self._count:
                genes[at] = chance.choice(list(_Gene))
        return tuple(genes)

    def _try(self, individual: _Individual) -> None:
        if individual in self._tried:
            return
        self._tried.add(individual)
        price = self._price(_program(self._first, individual))
        if not any(_at_most(other, price) for other in self._front.values()):
            self._front = {each: other for each, other in self._front.items() if not _at_most(price, other)}
            self._front[individual] = price


def _at_most(one: Price, other: Price) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def _program(first: int, individual: _Individual) -> ChainProgram:
    return tuple(
        Segment(
            at,
            at,
            recompute=gene is _Gene.AGAIN,
            moved=gene in (_Gene.MOVED, _Gene.ONE_BY_ONE),
            one_by_one=gene is _Gene.ONE_BY_ONE,
        )
        for at, gene in enumerate(individual, start=first)
    )


def _candidates(chain: StageChain, program: ChainProgram) -> Iterator[Candidate]:
    yield from (Candidate("swapadvisor", _program(chain.first, each)) for each in _Search(chain).best())


OFFLOAD = Offload(
    "swapadvisor",
    move_all,
    source="Huang et al. 2020, SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping",
    about="what is kept, moved or run again is found by a genetic search over the plan's own prediction",
    candidates=_candidates,
    alone=True,
    searches=True,
)
