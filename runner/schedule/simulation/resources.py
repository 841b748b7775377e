"""The resources that actions occupy while they run: ranks, links between ranks, and the reductions of each rank.

Compute and STEP occupy their rank. A message occupies the link from its sender to its receiver, in this direction, for
as long as its bytes take. If the link is occupied, the message waits, but its rank does not. A stash also occupies its
sender's rank until it has left, because its memory is needed for the next actions. The REDUCEs of a rank run one after
the other, at the same time as its compute. Ranks that reduce one stage together begin when the last of them is ready.
STEP waits for every REDUCE that its rank has begun. What a stage moves to the host's memory and back goes over the link
of its rank to the host (:mod:`.host_link`), for which forwards and backwards may have to wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from runner.schedule.simulation.host_link import HostLink, Lanes, StageMoves
from runner.schedule.simulation.weight_link import WeightLink, WeightRun
from runner.schedule.values import COMPUTE, MOVES, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import Step

__all__ = ["Resources"]

_MOVING = (Op.F, Op.B, Op.I)

Chance = Callable[[Action, bool], float]
"""Takes an action, and whether its message is meant; returns a factor of the duration of the action or the message."""


class Resources:
    """Plays actions one by one; each starts when its dependencies have ended and its resources are free.

    Args:
        view: the schedule or program to play.
        durations: durations by op or kind of fill, one for each stage; for SEND, one for each edge.
        stash: duration of sending a stash to another rank, for each stage.
        occupancy: time in which a message occupies its link, for each edge.
        chance: see :data:`Chance`.
        moves: what each stage moves to the host's memory and back; empty if none moves anything.
        weights: for each rank, how weights come from there; empty if none do.

    Attributes:
        start, end: start and end of each action, by rank and index in its list, in the unit of the durations.
        hosts: the link of each rank to its host.
    """

    def __init__(
        self,
        view: Schedule | Program,
        durations: Mapping[str, Sequence[float]],
        stash: Sequence[float],
        occupancy: Sequence[float],
        chance: Chance,
        moves: Sequence[StageMoves] = (),
        weights: Sequence[Mapping[tuple[bool, int, int], WeightRun]] = (),
    ) -> None:
        self.start = [[0.0] * len(row) for row in view.actions]
        self.end = [[0.0] * len(row) for row in view.actions]
        self._schedule = view.schedule if isinstance(view, Program) else view
        self._durations, self._stash, self._occupancy = durations, stash, occupancy
        self._latency = durations[Op.SEND]
        self._chance = chance
        self._moves = moves
        own = [self._schedule.stages_of(rank) if moves else () for rank in range(view.ranks)]
        lanes = [Lanes() for _ in range(view.ranks)]  # of a rank: what stages save and weights share them
        self.hosts = [
            HostLink([moves[stage] for stage in stages], shared) for stages, shared in zip(own, lanes, strict=True)
        ]
        self._weights = [WeightLink(runs, shared) for runs, shared in zip(weights, lanes, strict=bool(weights))]
        self._free = [0.0] * view.ranks
        self._links: dict[tuple[int, int | None], float] = defaultdict(float)  # sender, receiver -> when it is free
        self._reductions = [_Reductions() for _ in range(view.ranks)]
        self._ended: dict[Action, float] = {}

    @property
    def waited_for_host(self) -> tuple[float, ...]:
        """For each rank, the time in which it has waited for its host."""
        weights = [link.waited for link in self._weights] or [0.0] * len(self.hosts)
        return tuple(host.waited + other for host, other in zip(self.hosts, weights, strict=True))

    def play(self, steps: Sequence[Step]) -> None:
        """Play all steps, which must be in an order in which they can run.

        Raises:
            ValueError: ranks reduce the stages that they have in common in different orders.
        """
        left = steps
        while left:
            late: list[Step] = []
            held: set[int] = set()  # ranks at a STEP that waits for a reduction with other ranks
            for step in left:
                if step.rank in held or not self._play(step):
                    held.add(step.rank)
                    late.append(step)
            if len(late) == len(left):
                raise ValueError(f"{late[0].action} of rank {late[0].rank} waits for reductions that never begin")
            left = late

    def _play(self, step: Step) -> bool:
        """Play one step; return False and do nothing if the end of one of its dependencies is not known yet."""
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
            seconds = self._durations[action.work][action.stage] * self._chance(action, False)
            if op in COMPUTE:
                seconds *= self._schedule.size_of(action.microbatch)
            end = self._free[rank] = self._computed(rank, action, start, seconds)
        self.start[rank][cell], self.end[rank][cell] = start, end
        self._ended[action] = end
        return True

    def _computed(self, rank: int, action: Action, start: float, seconds: float) -> float:
        """The end of compute or STEP, which takes ``seconds`` and may have to wait for its rank's host."""
        if action.op not in _MOVING or not (self._weights or self._moves):
            return start + seconds
        asked, key = self._free[rank], (action.op is not Op.F, action.stage, action.microbatch or 0)
        if not self._moves:
            return self._weights[rank].run(key, asked, start, seconds)
        of, moves, host = (action.stage, action.microbatch), self._moves[action.stage], self.hosts[rank]
        turns = self._weights[rank].turns(key) if self._weights else None
        if action.op is Op.F:
            return host.forward(of, moves, asked, start, seconds, turns)
        return host.backward(of, moves, asked, start, seconds, turns, all_at_once=action.op is Op.I)

    def _send(self, rank: int, action: Action, ready: float, made: Sequence[Action]) -> tuple[float, float]:
        """The moments when a message starts and when it has arrived."""
        link = rank, action.peer
        start = max(ready, self._links[link])
        if action.payload is Payload.STASH:
            seconds = self._stash[action.stage] * self._chance(action, False)
            end = self._free[rank] = self._links[link] = start + seconds
            return start, end
        edge = action.stage - 1 if action.payload is Payload.GRADIENT else action.stage
        chance, occupied = self._chance(made[0], True), self._occupancy[edge]
        more = occupied * (self._schedule.size_of(action.microbatch) - 1.0)  # what its size adds to that of the mean
        self._links[link] = start + (occupied + more) * chance
        return start, start + (self._latency[edge] + more) * chance

    def _reduce(self, rank: int) -> None:
        """Begin every reduction for which all ranks are ready, after the rank ``rank`` has become ready for one."""
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
        """The time of the message that brings a tensor from another rank, which a schedule does not contain."""
        assert needed.microbatch is not None  # compute waits only for compute and messages
        if self._schedule.rank_of(needed.stage, needed.microbatch, needed.op) == rank:
            return 0.0
        edge = min(needed.stage, stage)
        more = self._occupancy[edge] * (self._schedule.size_of(needed.microbatch) - 1.0)
        return (self._latency[edge] + more) * self._chance(needed, True)


class _Reductions:
    """The reductions of one rank.

    Attributes:
        free: the moment when the last reduction that has begun will end.
        waiting: the reductions that have not begun, because another rank is not ready or an earlier one waits: action,
            index in the rank's list, and the moment when this rank became ready.
    """

    def __init__(self) -> None:
        self.free = 0.0
        self.waiting: deque[tuple[Action, int, float]] = deque()
