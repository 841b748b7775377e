"""Which faults a campaign injects: a covering array over kinds, places, ranks, layouts and forms of checkpoints."""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.layouts import FORMS, LAYOUTS
from runner.recipes.faults.places import PLACES, Place, places_of
from runner.recipes.faults.values import Chain, Fault

__all__ = ["FACTORS", "LENGTH", "Row", "chains", "possible_pairs", "rows"]

LENGTH = 8
"""Faults of one chain at most."""
FACTORS = ("kind", "place", "rank", "layout", "form")
_CANDIDATES = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the array: a fault, and the run that meets it."""

    fault: Fault
    layout: str
    form: str

    @property
    def values(self) -> tuple[str | int, ...]:
        """The values of :data:`FACTORS`."""
        return self.fault.kind, self.fault.place, self.fault.rank, self.layout, self.form

    @property
    def pairs(self) -> set[tuple[tuple[int, str | int], ...]]:
        """The values of any two factors together."""
        return set(itertools.combinations(enumerate(self.values), 2))


def rows(count: int, seed: int, kinds: Collection[str] = (), layouts: Collection[str] = ()) -> list[Row]:
    """``count`` rows, the same for the same arguments.

    Each is the one of several that are drawn which has the most pairs of values that no row before has.

    Args:
        kinds, layouts: only these; all if empty.
    """
    drawn = random.Random(seed)
    covered: set[tuple[tuple[int, str | int], ...]] = set()
    choices = [(kind, layout) for kind in KINDS for layout in LAYOUTS if _is_asked(kind, kinds, layout, layouts)]
    found: list[Row] = []
    while len(found) < count:
        candidates = [_drawn(drawn, *drawn.choice(choices)) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda row: len(row.pairs - covered))
        covered |= best.pairs
        found.append(best)
    return found


def possible_pairs() -> set[tuple[tuple[int, str | int], ...]]:
    """All pairs of values that some row can have."""
    return {
        pair
        for kind, layout, form in itertools.product(KINDS, LAYOUTS, FORMS)
        if KINDS[kind].suits(LAYOUTS[layout])
        for place in _places(kind, layout)
        for rank in _ranks(place, layout, form)
        for pair in Row(Fault(kind, rank, place.name, 1), layout, form).pairs
    }


def chains(rows: Sequence[Row], seed: int) -> list[Chain]:
    """The rows as chains, each a run of one layout and form that meets several faults."""
    drawn = random.Random(seed)
    groups: dict[tuple[str, str, bool], list[Fault]] = defaultdict(list)
    for row in rows:
        restarts = drawn.random() < 0.5 and KINDS[row.fault.kind].is_restarted
        groups[row.layout, row.form, restarts].append(row.fault)
    made = [(key, part) for key, faults in groups.items() for part in _parts(faults)]
    drawn.shuffle(made)
    return [Chain(number, *key, tuple(_ordered(faults))) for number, (key, faults) in enumerate(made)]


def _is_asked(kind: str, kinds: Collection[str], layout: str, layouts: Collection[str]) -> bool:
    if (kinds and kind not in kinds) or (layouts and layout not in layouts):
        return False
    return KINDS[kind].suits(LAYOUTS[layout]) and bool(_places(kind, layout))


def _drawn(drawn: random.Random, kind: str, layout: str) -> Row:
    form = drawn.choice(list(FORMS))
    place = drawn.choice(_places(kind, layout))
    rank = drawn.choice(_ranks(place, layout, form))
    most = min(place.most, 2) if place.kind == "call" and rank > 0 else place.most
    return Row(Fault(kind, rank, place.name, drawn.randint(1, most)), layout, form)


@functools.cache
def _places(kind: str, layout: str) -> list[Place]:
    return [place for place in places_of(LAYOUTS[layout]) if KINDS[kind].where(place)]


def _ranks(place: Place, layout: str, form: str) -> range:
    """The ranks that reach a place: of a whole checkpoint, and of all logs, only rank 0 writes."""
    writes_alone = place.kind == "call" and (form == "whole" or place.name in ("call open", "call write"))
    return range(LAYOUTS[layout].ranks if place.role == "rank" and not writes_alone else 1)


def _parts(faults: Sequence[Fault]) -> Iterator[Sequence[Fault]]:
    for first in range(0, len(faults), LENGTH):
        yield faults[first : first + LENGTH]


def _ordered(faults: Sequence[Fault]) -> list[Fault]:
    """Faults at the start of a run first and those at its end last, so that each is reached."""
    return sorted(faults, key=lambda fault: PLACES[fault.place].part)
