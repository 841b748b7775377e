"""What a rank may do of the next window while the verdict on this one is still under way.

Without a barrier before STEP, a rank updates its weights before it knows whether the others' gradients are finite and
how large they are together. It then begins the next window, but only with forwards, which can be thrown away: no
gradient may be added before the verdict, because the last window's are needed to take an update back.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4 (post-validation).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from runner.schedule.values import Action, Op, Program

__all__ = ["Speculation", "speculation"]


@dataclass(frozen=True)
class Speculation:
    """The part of a training program that needs no verdict on the window before.

    Args:
        lengths: of each rank's list of actions, how many at its beginning may run. All beginnings together form a
            consistent cut: what one receives, another one sent.
        in_flight: per rank, receives beyond its beginning whose messages left in another rank's beginning: to be
            received and dropped when the beginnings have to run again.
    """

    lengths: tuple[int, ...]
    in_flight: tuple[tuple[Action, ...], ...]


def speculation(program: Program) -> Speculation:
    """The longest beginning of each rank that holds forwards only, and receives only what was sent in another one."""
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
    """Each message's ``(sender, receiver, payload, number among them)`` -> position of this end of it."""
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
