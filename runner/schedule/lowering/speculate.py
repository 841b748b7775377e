"""Finds the actions of the next window that a rank may run before it knows the verdict on the current window.

With post-validation, a rank updates its weights before it knows whether the other ranks' gradients are finite and how
large the norm of all gradients is. It then begins the next window, but only with forwards, whose results can be
dropped. No gradient may be added before the verdict, because an update can be taken back only with the gradients of its
own window.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4 (post-validation).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from runner.schedule.values import Action, Op, Program

__all__ = ["Speculation", "speculation"]


@dataclass(frozen=True)
class Speculation:
    """The part of a training program that may run before the verdict on the window before.

    Args:
        lengths: for each rank, the number of actions at the beginning of its list that may run. These beginnings form a
            consistent cut: every message that is received in one of them is sent in one of them.
        in_flight: for each rank, the receives after its beginning whose messages are sent in another rank's beginning.
            They must be received and dropped if the beginnings have to run again.
    """

    lengths: tuple[int, ...]
    in_flight: tuple[tuple[Action, ...], ...]


def speculation(program: Program) -> Speculation:
    """Find the longest beginnings that contain only forwards and their messages, and form a consistent cut."""
    lengths = [_forwards_only(actions) for actions in program.actions]
    sends = [_positions(actions, Op.SEND, rank) for rank, actions in enumerate(program.actions)]
    receives = [_positions(actions, Op.RECV, rank) for rank, actions in enumerate(program.actions)]
    position_of_send = {key: position for each in sends for key, position in each.items()}
    changed = True
    while changed:
        changed = False
        for rank, each in enumerate(receives):
            for key, position in each.items():
                if position < lengths[rank] and position_of_send[key] >= lengths[key[0]]:
                    lengths[rank] = position
                    changed = True
    in_flight: list[list[Action]] = [[] for _ in program.actions]
    for rank, each in enumerate(receives):
        for key, position in each.items():
            if position >= lengths[rank] and position_of_send[key] < lengths[key[0]]:
                in_flight[rank].append(program.actions[rank][position])
    return Speculation(tuple(lengths), tuple(map(tuple, in_flight)))


def _forwards_only(actions: tuple[Action, ...]) -> int:
    allowed = (Op.F, Op.SEND, Op.RECV)
    return next((index for index, action in enumerate(actions) if action.op not in allowed), len(actions))


def _positions(actions: tuple[Action, ...], op: Op, rank: int) -> dict[tuple[int, int, str, int], int]:
    """Each message's ``(sender, receiver, payload, number among these messages)`` -> position of ``op`` in the list."""
    seen: Counter[tuple[int, int, str]] = Counter()
    found = {}
    for position, action in enumerate(actions):
        if action.op is op:
            assert action.peer is not None
            ends = (rank, action.peer) if op is Op.SEND else (action.peer, rank)
            key = (*ends, str(action.payload))
            found[*key, seen[key]] = position
            seen[key] += 1
    return found
