"""Checks that a program can run, and that its messages, reductions and updates are those that its schedule needs.

Every defect is one readable line that names the rank, the cell and the action.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from runner.schedule.checking.schedule import cell, cells, check, hangs
from runner.schedule.values import COMPUTE, Action, Op, Payload, Program, Schedule

__all__ = ["check_program"]


def check_program(program: Program) -> list[str]:
    """All defects of a lowered program; an empty list means that it is valid.

    The schedule must be valid, and the program's compute must be that of its schedule. Each rank's list must be a
    sub-sequence of the global order. Every message between ranks must be sent and received once, in one
    first-in-first-out order per source, destination and payload. The program must end even if SEND and RECV block until
    both sides are there. Every stage must be reduced after its last weight gradient of a window, and then stepped; no
    STEP may lie between an F and its B. Ranks that have several stages in common must reduce these in the same order.
    """
    schedule = program.schedule
    compute = tuple(tuple(a for a in row if a.op in COMPUTE) for row in program.actions)
    defects = check(schedule)
    if compute != schedule.compute:
        defects.append("the program's compute actions are not its schedule's")
    if defects:
        return defects
    ordered: dict[int, list[Action]] = defaultdict(list)
    for rank, action in program.order:
        ordered[rank].append(action)
    for rank, row in enumerate(program.actions):
        if ordered[rank] != list(row):
            defects.append(f"rank {rank}: its list is no sub-sequence of the global order")
    defects += [*_messages(program), *_updates(program)]
    return defects or [*hangs(program), *_rendezvous(program), *_collectives(program)]


def _messages(program: Program) -> Iterator[str]:
    schedule = program.schedule
    found = Counter((rank, action) for rank, _, action in cells(program) if action.op in (Op.SEND, Op.RECV))
    expected = Counter(_expected_messages(schedule))
    for rank, action in sorted((expected - found).elements(), key=str):
        yield f"rank {rank}: {action} is missing"
    for rank, action in sorted((found - expected).elements(), key=str):
        yield f"rank {rank}: {action} is one too many"
    sent: dict[tuple[int | None, int | None, str], list[tuple[int, int | None]]] = defaultdict(list)
    received: dict[tuple[int | None, int | None, str], list[tuple[int, int | None]]] = defaultdict(list)
    for rank, _, action in cells(program):
        if action.op is Op.SEND:
            sent[rank, action.peer, str(action.payload)].append((_receiver(action), action.microbatch))
        elif action.op is Op.RECV:
            received[action.peer, rank, str(action.payload)].append((action.stage, action.microbatch))
    for source, destination, payload in sorted(sent.keys() & received.keys(), key=str):
        if sent[source, destination, payload] != received[source, destination, payload]:
            kind = Payload(payload).name.lower()
            yield f"{kind}s from rank {source} to rank {destination} are received in another order than sent"


def _receiver(send: Action) -> int:
    """The stage that receives a SEND: activations and inputs go to the next one, gradients to the one before.

    A stash belongs to the same stage at both ends.
    """
    if send.payload is Payload.STASH:
        return send.stage
    return send.stage - 1 if send.payload is Payload.GRADIENT else send.stage + 1


def _expected_messages(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for move in schedule.moves:
        assert move.microbatch is not None  # every move has one
        owner = schedule.rank_of(move.stage, move.microbatch)
        for rank, peer in ((owner, move.peer), (move.peer, owner)):
            assert rank is not None  # every move names the rank that keeps the tensors
            for op in (Op.SEND, Op.RECV):
                yield rank, Action(op, move.stage, move.microbatch, Payload.STASH, peer)
    for microbatch, stage in itertools.product(range(schedule.microbatches), range(schedule.stages - 1)):
        low = schedule.rank_of(stage, microbatch)
        wanted = [(Payload.ACTIVATION, schedule.rank_of(stage + 1, microbatch))]
        if schedule.backward and schedule.has_other_backward(stage + 1):
            wanted.append((Payload.INPUT, schedule.rank_of(stage + 1, microbatch, Op.R)))
        for payload, high in wanted:
            if low != high:
                yield low, Action(Op.SEND, stage, microbatch, payload, high)
                yield high, Action(Op.RECV, stage + 1, microbatch, payload, low)
        low, high = (schedule.rank_of(one, microbatch, Op.B) for one in (stage, stage + 1))
        if schedule.backward and low != high:
            yield high, Action(Op.SEND, stage + 1, microbatch, Payload.GRADIENT, low)
            yield low, Action(Op.RECV, stage, microbatch, Payload.GRADIENT, high)


def _updates(program: Program) -> Iterator[str]:
    schedule = program.schedule
    for rank, row in enumerate(program.actions):
        found = Counter(action for action in row if action.op in (Op.REDUCE, Op.STEP))
        expected = Counter(
            Action(op, stage, window=window, row=schedule.copy_on(rank, stage))
            for op in (Op.REDUCE, Op.STEP)
            for stage in schedule.stages_of(rank)
            for window in range(schedule.windows)
            if schedule.backward
        )
        for action in sorted((expected - found).elements()):
            yield f"rank {rank}: {action} is missing"
        for action in sorted((found - expected).elements()):
            yield f"rank {rank}: {action} is one too many"
        yield from _update_order(schedule, rank, row)


def _update_order(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Iterator[str]:
    """Check that a stage's REDUCE comes after all compute of its window, then STEP, and then the next window."""
    reduced: set[tuple[int, int]] = set()
    stepped: set[tuple[int, int]] = set()
    for index, action in enumerate(row):
        if action.op is Op.REDUCE:
            reduced.add((action.stage, action.window))
        elif action.op is Op.STEP:
            stepped.add((action.stage, action.window))
            if (action.stage, action.window) not in reduced:
                yield f"{cell(rank, index, action)}: must come after the REDUCE of its stage"
        elif action.op is Op.FILL:
            if (action.stage, action.window) in stepped:
                yield f"{cell(rank, index, action)}: comes after the STEP of its window"
        elif action.op in COMPUTE:
            window = schedule.window_at(action)
            if (action.stage, window) in stepped:
                yield f"{cell(rank, index, action)}: reads weights that the STEP of its own window has changed"
            elif (action.stage, window) in reduced:
                yield f"{cell(rank, index, action)}: comes after the REDUCE of its stage and window"
                continue
            assert action.microbatch is not None  # only fills have none
            version = schedule.version_read(action.stage, action.microbatch, action.op)
            if version and schedule.backward and (action.stage, version - 1) not in stepped:
                yield f"{cell(rank, index, action)}: comes before the STEP of window {version - 1}"


def _rendezvous(program: Program) -> Iterator[str]:
    """Check that all ranks reach the end of their lists even if SEND and RECV block until both ends are there."""
    lists = program.actions
    position = [0] * len(lists)
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(lists[rank]):
            action = lists[rank][position[rank]]
            if action.op in (Op.SEND, Op.RECV):
                peer = action.peer
                assert peer is not None  # every message has one
                if position[peer] == len(lists[peer]) or not _meet(rank, action, lists[peer][position[peer]]):
                    break
                position[peer] += 1
                runnable.append(peer)
            position[rank] += 1
    for rank, row in enumerate(lists):
        if position[rank] < len(row):
            action = row[position[rank]]
            yield f"{cell(rank, position[rank], action)}: blocks for ever, because rank {action.peer} never meets it"


def _collectives(program: Program) -> Iterator[str]:
    """Check that all ranks of a group start its collectives in the same order, because they are matched by order."""
    schedule = program.schedule
    orders: dict[frozenset[int], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, _, action in cells(program):
        if action.op is Op.REDUCE:
            holders = frozenset(schedule.rows[row][action.stage] for row in schedule.copies_of(action.stage))
            orders[holders][rank].append((action.stage, action.window))
    for holders, found in orders.items():
        if len({tuple(order) for order in found.values()}) > 1:
            yield f"ranks {', '.join(map(str, sorted(holders)))} reduce the stages that they share in different orders"


def _meet(rank: int, mine: Action, theirs: Action) -> bool:
    """Whether the two actions, each at the front of its rank's list, are the ends of one message."""
    send, receive = (mine, theirs) if mine.op is Op.SEND else (theirs, mine)
    opposite = send.op is Op.SEND and receive.op is Op.RECV and theirs.peer == rank
    same = (send.microbatch, send.payload) == (receive.microbatch, receive.payload)
    return opposite and same and receive.stage == _receiver(send)
