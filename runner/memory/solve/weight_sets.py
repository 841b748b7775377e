"""Sets of weights that rid a device of a number of bytes: the least, or the first ones of an order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runner.memory.solve.residency import WeightUnit

__all__ = ["first_of_orders", "least_set", "taken_bytes"]

_MOST_KEPT = 512  # partial sets of one length that are kept; above it, a set that is a little larger may be found


def taken_bytes(chosen: Sequence[WeightUnit]) -> int:
    """What the device still holds of units that move: of two that follow each other, the largest pair."""
    if len(chosen) < 2:
        return sum(unit.device_bytes for unit in chosen)
    return max(a.device_bytes + b.device_bytes for a, b in zip(chosen, chosen[1:], strict=False))


class _Set(NamedTuple):
    """A set of units: what it moves, what the device is rid of, and its members, as indices."""

    moved: int
    freed: int
    members: tuple[int, ...]


def least_set(units: Sequence[WeightUnit], excess: int) -> list[WeightUnit]:
    """The units that move fewest bytes of all sets that rid the device of ``excess`` bytes; all, if none does.

    Of sets that move equally much, it is the one that frees most, and then the one of the earliest layers: they are
    needed last in a backward.

    Args:
        units: the units of a stage, in order.
        excess: the bytes that its device holds too much if nothing moves.
    """
    if excess <= 0:
        return []
    pairs = {a.device_bytes + b.device_bytes for at, a in enumerate(units) for b in units[at + 1 :]}
    found = [
        each
        for most in sorted({unit.device_bytes for unit in units} | pairs)
        for each in _sets(units, most, excess + most)
        if each.freed - taken_bytes([units[number] for number in each.members]) >= excess
    ]
    if not found:
        return list(units)
    best = min(found, key=lambda each: (each.moved, -each.freed, each.members))
    return [units[number] for number in best.members]


def _sets(units: Sequence[WeightUnit], most: int, needed: int) -> Iterable[_Set]:
    """Sets of which no two neighbours take more than ``most``, and that free ``needed``: those that move least."""
    of_last: dict[int, list[_Set]] = {-1: [_Set(0, 0, ())]}
    for number, unit in enumerate(units):
        longer = [
            _Set(each.moved + unit.device_bytes, each.freed + unit.home_bytes, (*each.members, number))
            for last, sets in of_last.items()
            if unit.device_bytes + (units[last].device_bytes if last >= 0 else 0) <= most
            for each in sets
            if each.freed < needed
        ]
        of_last[number] = _best(longer)
    return [each for sets in of_last.values() for each in sets if each.freed >= min(needed, 1)]


def _best(sets: Iterable[_Set]) -> list[_Set]:
    """The sets that no other one exceeds in what it frees while it moves as little."""
    kept: list[_Set] = []
    for each in sorted(sets, key=lambda one: (one.moved, -one.freed, one.members)):
        if not kept or each.freed > kept[-1].freed:
            kept.append(each)
    return kept if len(kept) <= _MOST_KEPT else kept[:: math.ceil(len(kept) / _MOST_KEPT)]


def first_of_orders(units: Sequence[WeightUnit], excess: int, orders: Iterable[Sequence[int]]) -> list[WeightUnit]:
    """The first units of an order, as few as rid the device of ``excess`` bytes; of several orders what moves least.

    Args:
        units: the units of a stage, in order.
        excess: the bytes that its device holds too much if nothing moves.
        orders: each has all units, by their numbers; the most worthwhile is first.
    """
    if excess <= 0:
        return []
    found = (_first(units, excess, order) for order in orders)
    return min(found, key=lambda chosen: sum(unit.device_bytes for unit in chosen))


def _first(units: Sequence[WeightUnit], excess: int, order: Sequence[int]) -> list[WeightUnit]:
    for count in range(1, len(order) + 1):
        chosen = [units[number] for number in sorted(order[:count])]
        if sum(unit.home_bytes for unit in chosen) - taken_bytes(chosen) >= excess:
            return chosen
    return list(units)
