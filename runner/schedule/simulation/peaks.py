"""Counts, from their lifetimes, the largest number of micro-batches that a rank holds at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from runner.schedule.liveness import ACTIVATIONS, Lifetime, lifetimes, most_at_once
from runner.schedule.values import Action, Program, Schedule

__all__ = ["peaks_in_order", "peaks_in_time"]

Times = Sequence[Sequence[float]]
"""A moment for each rank and index of its list."""


def peaks_in_order(view: Schedule | Program) -> tuple[float, ...]:
    """For each rank, the largest number of micro-batches held at once, in units of its whole share of the largest.

    No rank may keep tensors for another one. Then a rank's own list decides the result, because it runs in order.
    """
    share, schedule = _share(view), view.schedule if isinstance(view, Program) else view
    living = zip(view.actions, _activations(view), strict=True)
    return tuple(most_at_once(row, on_rank, schedule.part_of_largest) / share for row, on_rank in living)


def peaks_in_time(view: Schedule | Program, start: Times, end: Times) -> tuple[float, ...]:
    """Do the same as :func:`peaks_in_order` if ranks keep tensors for others, which come and go at certain times.

    Args:
        view: a schedule or a program.
        start, end: start and end of its actions.
    """
    begun = _by_action(view, start)
    ended = _by_action(view, end)
    peaks = []
    for on_rank in _activations(view):
        changes = [(begun[each.begins] if each.grows else ended[each.begins], 1) for each in on_rank if each.begins]
        changes += [(ended[each.ends], -1) for each in on_rank if each.ends]
        peaks.append(max(accumulate(step for _, step in sorted(changes)), default=0) / _share(view))
    return tuple(peaks)


def _activations(view: Schedule | Program) -> list[list[Lifetime]]:
    return [[each for each in on_rank if each.kind in ACTIVATIONS] for on_rank in lifetimes(view)]


def _by_action(view: Schedule | Program, times: Times) -> dict[Action, float]:
    rows = zip(view.actions, times, strict=True)
    return {action: moment for row, moments in rows for action, moment in zip(row, moments, strict=True)}


def _share(view: Schedule | Program) -> int:
    """The number of stages times parts whose activations make up a rank's whole share of a micro-batch."""
    schedule = view.schedule if isinstance(view, Program) else view
    return schedule.chunks * schedule.parts
