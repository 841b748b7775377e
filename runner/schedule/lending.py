"""Adds moves to a schedule: ranks that keep many micro-batches lend what they save of some to ranks that keep few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from runner.schedule.values import Action, Op, Schedule

__all__ = ["FEWEST", "Loan", "with_loans"]

FEWEST = 2
"""The fewest micro-batches that a lender keeps: the next to run backward, and one that runs forward before it."""


class Loan(NamedTuple):
    """A rank lends micro-batches to another one.

    Args:
        lender, host: the two ranks.
        most: the most micro-batches that the lender keeps at once, at least :data:`FEWEST`.
    """

    lender: int
    host: int
    most: int


def with_loans(schedule: Schedule, loans: Iterable[Loan]) -> Schedule:
    """The schedule with the moves of some loans; the order of compute stays.

    Args:
        schedule: a schedule without moves, of whole backwards, with one stage on each lender.
        loans: at most one for each lender.
    """
    by_lender = {loan.lender: loan for loan in loans}
    rows = (
        tuple(_with_moves(row, by_lender[rank])) if rank in by_lender else row
        for rank, row in enumerate(schedule.actions)
    )
    return replace(schedule, actions=tuple(rows))


def _with_moves(row: Sequence[Action], loan: Loan) -> Iterator[Action]:
    """Add moves to a lender's list: if room is short, that micro-batch leaves whose backward is last of all.

    It is back one action before its backward.
    """
    turn = {action.microbatch: index for index, action in enumerate(row) if action.op is Op.B}
    kept: list[int] = []
    away: set[int] = set()
    for index, action in enumerate(row):
        soon = {each.microbatch for each in row[index : index + 2] if each.op is Op.B}
        coming = [microbatch for microbatch in away if microbatch in soon]
        room = loan.most - len(coming) - (action.op is Op.F)
        while len(kept) > room:
            latest = max((microbatch for microbatch in kept if microbatch not in soon), key=lambda each: turn[each])
            kept.remove(latest)
            away.add(latest)
            yield Action(Op.OUT, action.stage, latest, peer=loan.host)
        for microbatch in coming:
            kept.append(microbatch)
            away.remove(microbatch)
            yield Action(Op.IN, action.stage, microbatch, peer=loan.host)
        yield action
        assert action.microbatch is not None  # every compute action has one
        if action.op is Op.F:
            kept.append(action.microbatch)
        else:
            kept.remove(action.microbatch)
