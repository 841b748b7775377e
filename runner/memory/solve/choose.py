"""Chooses the fastest of the programs that a strategy offers, under a budget.

The candidates do not depend on the budget, and are asked in the order of their seconds. So the predicted peak never
rises as the budget falls, and the seconds never fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runner.memory.solve.program import DEEPEST, depth
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import Offer, Program, StageChoice

__all__ = ["Cost", "Priced", "fastest_that_fits", "priced"]

Cost = Callable[[Program], tuple[int, float]]
"""A function from a stage's program to the bytes of its peak and the seconds of its forward and backward."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A candidate with its predicted cost."""

    offer: Offer
    program: Program


def priced(candidates: Iterable[Candidate], cost: Cost) -> tuple[Priced, ...]:
    """The candidates that can be run, with their costs, from the fastest to the slowest; of equals, the smaller."""
    found = [
        Priced(Offer(each.name, *cost(each.program)), each.program)
        for each in candidates
        if depth(each.program) <= DEEPEST
    ]
    return tuple(sorted(found, key=lambda each: (each.offer.seconds, each.offer.peak_bytes)))


def fastest_that_fits(candidates: tuple[Priced, ...], budget: int) -> tuple[Program, StageChoice]:
    """The first of the candidates whose peak is within the budget; if there is none, that with the least peak."""
    fitting = (each for each in candidates if each.offer.peak_bytes <= budget)
    least = min(candidates, key=lambda each: each.offer.peak_bytes)
    chosen = next(fitting, least)
    return chosen.program, StageChoice(chosen.offer, budget, tuple(each.offer for each in candidates))
