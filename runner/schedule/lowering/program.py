"""From a schedule to a program: pure passes over one global order of ``(rank, action)``.

Because every rank's list is a sub-sequence of that order, and both ends of a message stand next to each other in
it, no program can deadlock, not even where SEND and RECV block: the first unfinished message always has both of
its ranks waiting for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from runner.schedule.simulation.clock import Costs, StageCosts, play
from runner.schedule.values import MOVES, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import Step, walk

__all__ = ["Order", "add_reduce", "add_send_recv", "add_step", "lower", "simulated_order"]

Order = tuple[tuple[int, Action], ...]
"""One global order of ``(rank, action)``."""


def lower(schedule: Schedule, costs: Costs | StageCosts | None = None) -> Program:
    """The program of ``schedule``: its compute with SEND, RECV, REDUCE and STEP.

    Args:
        schedule: a valid one; see :func:`runner.schedule.checking.schedule.check`.
        costs: durations that decide when messages are expected; default: B = 2 F.

    Raises:
        ValueError: if the schedule cannot run to its end.
    """
    order = simulated_order(schedule, costs or Costs())
    if schedule.backward:
        order = add_reduce(schedule, order)
    order = add_send_recv(schedule, order)
    if schedule.backward:
        order = add_step(schedule, order)
    lists: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, action in order:
        lists[rank].append(action)
    return Program(schedule, tuple(map(tuple, lists)), order)


def simulated_order(schedule: Schedule, costs: Costs | StageCosts) -> Order:
    """All compute, in the order in which it ends when simulated.

    So a message is placed where its content exists, and its RECV before whatever its rank finishes later:
    receives are posted early enough to overlap with compute and no earlier. Where stages have copies, the STEP of each
    waits for all of them: there a window's compute ends everywhere before the next one's begins.
    """
    walked = walk(schedule)
    times = play(schedule, walked, costs)
    has_copies = len(schedule.rows) > 1

    def moment(step: Step) -> tuple[int, float]:
        window = schedule.window_at(step.action) if has_copies else 0
        return window, times.end[step.rank][step.cell]

    steps = sorted(walked.steps, key=moment)
    return tuple((step.rank, step.action) for step in steps)  # a stable sort of a topological order is one


def add_send_recv(schedule: Schedule, order: Order) -> Order:
    """After each action whose result another rank needs: the SEND, and at the same moment the peer's RECV.

    Stages that are neighbours on one rank need no message. In place of a move stands the message that does it.

    Source: the principle is that of torch.distributed.pipelining's lowering.
    """

    def extended() -> Iterator[tuple[int, Action]]:
        for rank, action in order:
            if action.op in MOVES:
                yield from _moving(rank, action)
            else:
                yield rank, action
                yield from _messages(schedule, rank, action)

    return tuple(extended())


def _moving(rank: int, move: Action) -> Iterator[tuple[int, Action]]:
    """The message by which what a rank keeps goes to the rank that hosts it, or comes back from there."""
    assert move.peer is not None  # every move has a rank that keeps what leaves
    source, target = (rank, move.peer) if move.op is Op.OUT else (move.peer, rank)
    for at, op, peer in ((source, Op.SEND, target), (target, Op.RECV, source)):
        yield at, Action(op, move.stage, move.microbatch, Payload.STASH, peer)


def _messages(schedule: Schedule, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
    if action.microbatch is None:
        return
    leaving: Sequence[int] = (action.microbatch,)
    if action.op is Op.F:
        leaving = schedule.joined_with(action.microbatch)
        if action.microbatch != leaving[-1]:
            return  # what is joined leaves together
    for microbatch in leaving:
        for payload, to_stage, peer in _made(schedule, action._replace(microbatch=microbatch)):
            if peer != rank:
                yield rank, Action(Op.SEND, action.stage, microbatch, payload, peer)
                yield peer, Action(Op.RECV, to_stage, microbatch, payload, rank)


def _made(schedule: Schedule, action: Action) -> Iterator[tuple[Payload, int, int]]:
    """What an action makes for other stages: payload, the stage that it is for, and the rank of that stage."""
    stage, microbatch = action.stage, action.microbatch
    assert microbatch is not None  # compute always has one
    if action.op is Op.F and stage + 1 < schedule.stages:
        yield Payload.ACTIVATION, stage + 1, schedule.rank_of(stage + 1, microbatch)
        if schedule.backward and schedule.has_other_backward(stage + 1):
            yield Payload.INPUT, stage + 1, schedule.rank_of(stage + 1, microbatch, Op.R)
    elif action.op in (Op.B, Op.I) and stage > 0:
        yield Payload.GRADIENT, stage - 1, schedule.rank_of(stage - 1, microbatch, Op.B)


def add_reduce(schedule: Schedule, order: Order) -> Order:
    """After the last compute of each stage and window, on each rank that holds it: its REDUCE.

    Ranks that have several stages in common reduce these in one order, as collectives must: a stage whose turn has not
    come waits for the stages before it. Run before :func:`add_send_recv`, so that the gradient another rank waits for
    leaves first.
    """
    last: dict[tuple[int, int, int], int] = {}
    for position, (rank, action) in enumerate(order):
        if action.op is not Op.FILL and action.op not in MOVES:
            last[rank, action.stage, schedule.window_at(action)] = position
    ends: dict[tuple[int, int], int] = defaultdict(int)  # stage, window -> when its last copy has its gradients
    for (_, stage, window), position in last.items():
        ends[stage, window] = max(ends[stage, window], position)
    due: dict[int, list[Action]] = defaultdict(list)
    turn: dict[int, int] = defaultdict(int)  # rank -> when the copies that it has reduced so far were all due
    for (rank, stage, window), position in sorted(last.items(), key=lambda one: ends[one[0][1:]]):
        if len(schedule.copies_of(stage)) > 1:
            position = turn[rank] = max(turn[rank], position)
        due[position].append(Action(Op.REDUCE, stage, window=window, row=schedule.copy_on(rank, stage)))

    def extended() -> Iterator[tuple[int, Action]]:
        for position, (rank, action) in enumerate(order):
            yield rank, action
            for reduce in due.get(position, ()):
                yield rank, reduce

    return tuple(extended())


def add_step(schedule: Schedule, order: Order) -> Order:
    """After a rank's last REDUCE of a window, and what it lends or hosts: the STEP of each of its stages, together.

    Of an asynchronous schedule each stage's directly follows its own REDUCE, because others may wait for its weights.

    Fills of the window come before them, so that what they make is used at once. They stand together because the
    gradient norm that clips them is known only when all are reduced.
    """
    if schedule.is_asynchronous:
        return tuple(_stepping_by_itself(order))
    last: dict[tuple[int, int], int] = {}
    for position, (rank, action) in enumerate(order):
        if action.op is Op.REDUCE or action.op is Op.FILL:
            last[rank, action.window] = position
        elif action.payload is Payload.STASH and action.microbatch is not None:
            window = schedule.window_of(action.microbatch)
            last[rank, window] = position  # others wait for what it still hosts, and it for them at STEP
    due = {position: window for (_, window), position in last.items()}

    def extended() -> Iterator[tuple[int, Action]]:
        for position, (rank, action) in enumerate(order):
            yield rank, action
            if position in due:
                for stage in schedule.stages_of(rank):
                    yield rank, Action(Op.STEP, stage, window=due[position], row=schedule.copy_on(rank, stage))

    return tuple(extended())


def _stepping_by_itself(order: Order) -> Iterator[tuple[int, Action]]:
    for rank, action in order:
        yield rank, action
        if action.op is Op.REDUCE:
            yield rank, action._replace(op=Op.STEP)
