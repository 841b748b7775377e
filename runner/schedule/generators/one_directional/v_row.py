"""Builds a rank's list over two stages (chunks of a V, or of two pipelines) without explicit micro-batches."""

from __future__ import annotations

from collections import Counter

from runner.schedule.values import Action, Op

__all__ = ["VRow"]


class VRow:
    """One rank's list while it is built: each op takes the next micro-batch of its chunk.

    Args:
        stages: the stages of chunk 0 and chunk 1.
        first: the first micro-batch of each chunk.
        stride: the difference between a micro-batch of a chunk and its next one.
    """

    def __init__(self, stages: tuple[int, int], *, first: tuple[int, int] = (0, 0), stride: int = 1) -> None:
        self._stages = stages
        self._first = first
        self._stride = stride
        self._next: Counter[tuple[Op, int]] = Counter()
        self._owed: list[Action] = []
        self.actions: list[Action] = []

    def count(self, op: Op, chunk: int) -> int:
        """The number of F, or of backwards (I or B), of the chunk in the list."""
        return self._next[Op.I if op is Op.B else op, chunk]

    def add(self, *ops: tuple[Op, int]) -> None:
        """Append each ``(op, chunk)``, with op F, B or I."""
        for op, chunk in ops:
            kind = Op.I if op is Op.B else op  # B and I share their count
            microbatch = self._first[chunk] + self._stride * self._next[kind, chunk]
            action = Action(op, self._stages[chunk], microbatch)
            self._next[kind, chunk] += 1
            self.actions.append(action)
            if op is Op.I:
                self._owed.append(action._replace(op=Op.W))

    def pay(self, chunk: int | None = None) -> None:
        """Append the W that has been due longest, only of ``chunk`` if one is given."""
        stage = None if chunk is None else self._stages[chunk]
        action = next(action for action in self._owed if stage is None or action.stage == stage)
        self._owed.remove(action)
        self.actions.append(action)

    def pay_all(self, chunk: int) -> None:
        """Append every W of ``chunk`` that is due."""
        for action in [action for action in self._owed if action.stage == self._stages[chunk]]:
            self._owed.remove(action)
            self.actions.append(action)
