"""The in-order walk: every rank runs its list from the front, and each action when its dependencies are done."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from runner.schedule.dependencies import dependencies
from runner.schedule.remembered import remembered
from runner.schedule.values import Action, Program, Schedule

__all__ = ["Step", "Stuck", "Walk", "in_order", "walk"]


class Step(NamedTuple):
    """One action of the walk, with the actions for which it waited."""

    rank: int
    cell: int  # index in the rank's list
    action: Action
    waits_for: tuple[Action, ...]


class Stuck(NamedTuple):
    """A rank that can never continue: ``action``, at ``cell`` of its list, waits for ``missing``."""

    rank: int
    cell: int
    action: Action
    missing: Action


@dataclass(frozen=True)
class Walk:
    """A topological order of all actions that can run, and the places where ranks are stuck."""

    steps: tuple[Step, ...]
    stuck: tuple[Stuck, ...]


@remembered
def in_order(program: Program) -> Walk:
    """The walk of a program in its own order, which is topological; faster than :func:`walk`, but without checks."""
    cells = [itertools.count() for _ in program.actions]
    return Walk(
        tuple(Step(rank, next(cells[rank]), action, dependencies(program, action)) for rank, action in program.order),
        (),
    )


@remembered
def walk(view: Schedule | Program) -> Walk:
    """Walk all ranks' lists as far as possible, one action of each rank in turn; linear in the number of actions."""
    lists = view.actions
    position = [0] * len(lists)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    held: dict[int, Stuck] = {}
    runnable = deque(range(len(lists)))
    steps: list[Step] = []
    while runnable:
        rank = runnable.popleft()
        held.pop(rank, None)
        cell = position[rank]
        if cell == len(lists[rank]):
            continue
        action = lists[rank][cell]
        waits_for = dependencies(view, action)
        missing = next((needed for needed in waits_for if needed not in done), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
            held[rank] = Stuck(rank, cell, action, missing)
            continue
        done.add(action)
        steps.append(Step(rank, cell, action, waits_for))
        position[rank] = cell + 1
        runnable.append(rank)
        if action in waiting:
            runnable.extend(waiting.pop(action))
    return Walk(tuple(steps), tuple(held[rank] for rank in sorted(held)))
