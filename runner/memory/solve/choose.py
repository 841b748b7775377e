"""Chooses the fastest of the programs that a strategy offers, under a budget.

The candidates do not depend on the budget, and are asked in the order of their seconds. So the predicted peak never
rises as the budget falls, and the seconds never fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runner.memory.solve.program import DEEPEST, depth
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import Offer, Price, Program, StageChoice

__all__ = ["Cost", "Priced", "fastest_that_fits", "priced"]


Cost = Callable[[Program], Price]
"""A function from a stage's program to its price."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A candidate with its predicted cost."""

    offer: Offer
    program: Program


def priced(candidates: Iterable[Candidate], cost: Cost) -> tuple[Priced, ...]:
    """The candidates that can be run, with their costs, from the fastest to the slowest.

    Of those that are equally fast, the one that moves less is the first, then the one that leaves the stage as it is,
    whose backward can be divided, and then the smaller one.
    """
    found = [
        Priced(Offer(each.name, *cost(each.program)), each.program)
        for each in candidates
        if depth(each.program) <= DEEPEST
    ]
    return tuple(sorted(found, key=_rank))


def _rank(each: Priced) -> tuple[float, int, bool, int]:
    offer, program = each.offer, each.program
    is_plain = isinstance(program, tuple) and not any(segment.recompute or segment.moved for segment in program)
    return offer.seconds, offer.moved_bytes, not is_plain, offer.peak_bytes


def fastest_that_fits(candidates: tuple[Priced, ...], budget: int) -> tuple[Program, StageChoice]:
    """The first of the candidates whose peak is within the budget; if there is none, that with the least peak."""
    fitting = (each for each in candidates if each.offer.peak_bytes <= budget)
    least = min(candidates, key=lambda each: each.offer.peak_bytes)
    chosen = next(fitting, least)
    offers, programs = tuple(each.offer for each in candidates), tuple(each.program for each in candidates)
    return chosen.program, StageChoice(chosen.offer, budget, offers, programs)
