"""How many micro-batches a rank holds at most, counted from their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from runner.schedule.liveness import ACTIVATIONS, Lifetime, lifetimes, most_at_once
from runner.schedule.values import Action, Program, Schedule

__all__ = ["peaks_in_order", "peaks_in_time"]

Times = Sequence[Sequence[float]]
"""A moment per rank and index of its list."""


def peaks_in_order(view: Schedule | Program) -> tuple[float, ...]:
    """Per rank, most micro-batches of its whole share held at once, where no rank keeps any for another.

    A rank runs in order, so its list alone decides.
    """
    share = _share(view)
    living = zip(view.actions, _activations(view), strict=True)
    return tuple(most_at_once(row, on_rank) / share for row, on_rank in living)


def peaks_in_time(view: Schedule | Program, start: Times, end: Times) -> tuple[float, ...]:
    """:func:`peaks_in_order` where ranks keep others' micro-batches: how many depends on when these come and go.

    Args:
        view: a schedule or a program.
        start, end: of its actions.
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
    """Activations of one stage and part that make a micro-batch of a rank's whole share."""
    schedule = view.schedule if isinstance(view, Program) else view
    return schedule.chunks * schedule.parts
