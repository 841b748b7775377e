"""Limits and closed forms that several entries of the catalogue share."""

from __future__ import annotations

from collections.abc import Sequence

from runner.options import Option
from runner.schedule.kinds import Formulas, Legal

__all__ = [
    "ANY_CHUNKS",
    "EQUAL",
    "EVEN_CHUNKS",
    "EVEN_RANKS",
    "MULTIPLE_OF_RANKS",
    "SHARES",
    "TWO_CHUNKS",
    "flushed",
    "looped",
    "two_way",
    "whole_number",
    "zero_bubble",
]

ANY_CHUNKS = Legal("at least 1", lambda ranks, chunks: True)
TWO_CHUNKS = Legal("2 or null, one down and one up the V", lambda ranks, chunks: chunks == 2)
EVEN_CHUNKS = Legal("even or null, two for each wave", lambda ranks, chunks: chunks % 2 == 0)
EVEN_RANKS = Legal("even", lambda _, ranks: ranks % 2 == 0)
MULTIPLE_OF_RANKS = Legal("a multiple of D", lambda ranks, microbatches: microbatches % ranks == 0)

_LOOPED_SLOTS = "((v - 1) * max(T, D) + T + D - 1)"
EQUAL = "F == I == W and B == I + W"
"""The condition that the forward and both halves of the backward take equal times."""


SHARES = Option(
    "shares",
    list[float],
    "parts of the samples that micro-batches take, as [1,1,2]; null = alike",
    "[1,1,2]",
    elsewhere="The other schedules have an order for micro-batches of one size",
)
"""For each micro-batch, its share of the samples, in any unit."""


def whole_number(
    key: str, least: int, about: str, *, example: int, elsewhere: str, legal: Sequence[int] = ()
) -> Option:
    """An option that is a whole number, and at least ``least``."""
    rule = f"must be at least {least}"
    return Option(
        key,
        int,
        about,
        str(example),
        rule,
        lambda value: bool(value < least),
        fix=str(least),
        elsewhere=elsewhere,
        legal=legal,
    )


def flushed(peak: str, when: str = "True") -> Formulas:
    """Closed forms of gpipe, 1f1b and related schedules, which differ only in memory."""
    return Formulas("(T + D - 1) * (F + B)", "(D - 1) / (T + D - 1)", peak, "(D - 1) * (F + B)", when)


def looped(peak: str) -> Formulas:
    """Closed forms of both looping schedules; if T >= D, the bubble is (D - 1) / (v T + D - 1)."""
    idle = f"({_LOOPED_SLOTS} / v - T) * (F + B)"
    return Formulas(f"{_LOOPED_SLOTS} * (F + B) / v", f"1 - v * T / {_LOOPED_SLOTS}", peak, idle)


def zero_bubble(extra: str, peak: str, inner_idle: str, when: str) -> Formulas:
    """Closed forms of a split schedule that takes ``extra`` time beyond its compute."""
    work = "T * (F + I + W)"
    return Formulas(f"{work} + {extra}", f"{extra} / ({work} + {extra})", peak, inner_idle, when)


def two_way(idle: str, peak: str, inner_idle: str | None = None, when: str = "True") -> Formulas:
    """Closed forms of a two-way schedule that takes ``idle`` time beyond its compute."""
    work = "T * (F + B)"
    return Formulas(f"{work} + {idle}", f"{idle} / ({work} + {idle})", peak, inner_idle or idle, when)
