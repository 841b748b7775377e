"""What actions occupy while they run: ranks, links between ranks, and the reductions of each rank.

Compute and STEP occupy their rank. A message occupies the link from its sender to its receiver, in that direction, for
as long as its bytes take; a message that finds its link occupied waits for it, and its rank does not. A stash occupies
its sender's rank besides until it has left, because its memory is needed for what comes next. The REDUCEs of a rank
follow each other beside its compute; ranks that reduce one stage together begin when the last of them is ready. STEP
waits for every REDUCE that its rank has begun.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from runner.schedule.values import COMPUTE, MOVES, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import Step

__all__ = ["Resources"]

Chance = Callable[[Action, bool], float]
"""What the duration of an action, or of the message that carries what the action made, is multiplied by."""


class Resources:
    """Plays actions one by one, each when what it waits for has ended and what it occupies is free.

    Args:
        view: what is played.
        durations: by op, or kind of fill, and stage; of messages by edge.
        stash: by stage: moving what it keeps of a micro-batch to another rank.
        occupancy: by edge: how long a message occupies its link.
        chance: see :data:`Chance`.

    Attributes:
        start, end: per rank and index of its list, in the unit of the durations.
    """

    def __init__(
        self,
        view: Schedule | Program,
        durations: Mapping[str, Sequence[float]],
        stash: Sequence[float],
        occupancy: Sequence[float],
        chance: Chance,
    ) -> None:
        self.start = [[0.0] * len(row) for row in view.actions]
        self.end = [[0.0] * len(row) for row in view.actions]
        self._schedule = view.schedule if isinstance(view, Program) else view
        self._durations, self._stash, self._occupancy = durations, stash, occupancy
        self._latency = durations[Op.SEND]
        self._chance = chance
        self._free = [0.0] * view.ranks
        self._links: dict[tuple[int, int | None], float] = defaultdict(float)  # from a rank to a rank: free from then
        self._reductions = [_Reductions() for _ in range(view.ranks)]
        self._ended: dict[Action, float] = {}

    def play(self, steps: Sequence[Step]) -> None:
        """Play all steps, which stand in an order in which they can run.

        Raises:
            ValueError: ranks reduce stages that they have in common in different orders.
        """
        left = steps
        while left:
            late: list[Step] = []
            held: set[int] = set()  # ranks at a STEP whose reductions wait for other ranks
            for step in left:
                if step.rank in held or not self._play(step):
                    held.add(step.rank)
                    late.append(step)
            if len(late) == len(left):
                raise ValueError(f"{late[0].action} of rank {late[0].rank} waits for reductions that never begin")
            left = late

    def _play(self, step: Step) -> bool:
        """Play one step; False, and nothing is done, where the end of something that it waits for is not known yet."""
        rank, cell, action, waits_for = step
        op = action.op
        start = self._free[rank]
        for needed in waits_for:
            arrived = self._ended.get(needed)
            if arrived is None:
                return False
            if needed.stage != action.stage and op in COMPUTE:
                arrived += self._crossing(needed, rank, action.stage)
            if arrived > start:
                start = arrived
        if op is Op.SEND:
            start, end = self._send(rank, action, start, waits_for)
        elif op is Op.RECV or op in MOVES:
            start, end = self._free[rank], start
        elif op is Op.REDUCE:
            self._reductions[rank].waiting.append((action, cell, start))
            self._reduce(rank)
            return True
        else:
            if op is Op.STEP:
                if self._reductions[rank].waiting:
                    return False
                start = max(start, self._reductions[rank].free)
            end = self._free[rank] = start + self._durations[action.work][action.stage] * self._chance(action, False)
        self.start[rank][cell], self.end[rank][cell] = start, end
        self._ended[action] = end
        return True

    def _send(self, rank: int, action: Action, ready: float, made: Sequence[Action]) -> tuple[float, float]:
        """When a message leaves, and when it is there."""
        link = rank, action.peer
        start = max(ready, self._links[link])
        if action.payload is Payload.STASH:
            seconds = self._stash[action.stage] * self._chance(action, False)
            end = self._free[rank] = self._links[link] = start + seconds
            return start, end
        edge = action.stage - 1 if action.payload is Payload.GRADIENT else action.stage
        chance = self._chance(made[0], True)
        self._links[link] = start + self._occupancy[edge] * chance
        return start, start + self._latency[edge] * chance

    def _reduce(self, rank: int) -> None:
        """Begin every reduction that the newest one of a rank completes."""
        due = deque([rank])
        while due:
            queue = self._reductions[due.popleft()].waiting
            if not queue:
                continue
            action = queue[0][0]
            ranks = self._ranks_of(action)
            heads = [self._reductions[each].waiting[0] for each in ranks if self._reductions[each].waiting]
            if any(head[0]._replace(row=action.row) != action for head in heads) or len(heads) < len(ranks):
                continue
            start = max(*(head[2] for head in heads), *(self._reductions[each].free for each in ranks))
            end = start + self._durations[Op.REDUCE][action.stage] * self._chance(action, False)
            for each, (own, cell, _) in zip(ranks, heads, strict=True):
                self._reductions[each].waiting.popleft()
                self._reductions[each].free = end
                self.start[each][cell], self.end[each][cell], self._ended[own] = start, end, end
            due.extend(ranks)

    def _ranks_of(self, reduce: Action) -> list[int]:
        """The ranks that reduce a stage together."""
        rows = self._schedule.rows
        return [rows[row][reduce.stage] for row in self._schedule.copies_of(reduce.stage)]

    def _crossing(self, needed: Action, rank: int, stage: int) -> float:
        """Time of the message that a compute-only schedule leaves unsaid."""
        assert needed.microbatch is not None  # compute waits for compute and messages only
        if self._schedule.rank_of(needed.stage, needed.microbatch, needed.op) == rank:
            return 0.0
        return self._latency[min(needed.stage, stage)] * self._chance(needed, True)


class _Reductions:
    """One rank's reductions.

    Attributes:
        free: when the last one that has begun ends.
        waiting: those whose other ranks have not come to them, or that wait for one before: action, index in the
            rank's list, and when this rank was ready.
    """

    def __init__(self) -> None:
        self.free = 0.0
        self.waiting: deque[tuple[Action, int, float]] = deque()
