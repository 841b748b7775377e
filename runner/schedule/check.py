"""Checks that a schedule, or the program made of it, can run and means what a schedule must mean.

Every defect is one readable line that names the rank, the cell and the action.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from runner.schedule.values import COMPUTE, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import walk

__all__ = ["check", "check_program"]


def check(schedule: Schedule) -> list[str]:
    """All defects of a compute-only schedule; empty means that it is valid.

    Shape: rows and tables agree, every cell is compute of a stage that lives on this rank. Bijection: each stage
    and micro-batch has exactly one F and exactly one of B, or I with W. Order: F before B or I before W; forwards
    that are one stand together. Versions: a rank starts no window before it has ended the one before. Deadlock: all
    ranks reach their end.
    """
    defects = [*_shape(schedule)]
    if defects:
        return defects  # the rest would look up stages and micro-batches that do not exist
    defects += [
        *_bijection(schedule),
        *_local_order(schedule),
        *_joined(schedule),
        *_moves(schedule),
        *_windows(schedule),
    ]
    return defects or [*_hangs(schedule)]  # what is missing or misplaced would hang anyway


def check_program(program: Program) -> list[str]:
    """All defects of a lowered program; empty means that it is valid.

    Its compute is its schedule's, which is checked too. Each list is a sub-sequence of the global order. Every
    message between ranks is sent and received once, in one first-in-first-out order per source, destination and
    payload, and the program ends even where SEND and RECV block until both sides are there. Every stage is reduced
    after its last weight gradient of a window and then stepped; no STEP lies between an F and its B. Ranks that have
    several stages in common reduce these in one order.
    """
    schedule = program.schedule
    compute = tuple(tuple(a for a in row if a.op in COMPUTE) for row in program.actions)
    defects = check(schedule)
    if compute != schedule.actions:
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
    return defects or [*_hangs(program), *_rendezvous(program), *_collectives(program)]


def _cell(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, cell {index} ({action})"


def _cells(view: Schedule | Program) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(view.actions):
        for index, action in enumerate(row):
            yield rank, index, action


def _shape(schedule: Schedule) -> Iterator[str]:
    stages = schedule.stages
    for row, owners in enumerate(schedule.placement):
        if len(owners) != stages or not all(0 <= rank < schedule.ranks for rank in owners):
            yield f"placement row {row} must give each of {stages} stages a rank below {schedule.ranks}"
            return
    if not all(0 <= row < len(schedule.placement) for row in schedule.pipeline_of_microbatch):
        yield f"pipeline_of_microbatch must name rows of the placement, below {len(schedule.placement)}"
        return
    if schedule.microbatches % schedule.joined or schedule.joined % schedule.parts:
        yield f"{schedule.microbatches} micro-batches must be whole groups of {schedule.joined}, of whole ones"
        return
    if schedule.window_of_microbatch and len(schedule.window_of_microbatch) != schedule.microbatches:
        yield f"window_of_microbatch must have one entry for each of {schedule.microbatches} micro-batches"
        return
    for rank, index, action in _cells(schedule):
        if action.op not in COMPUTE:
            yield f"{_cell(rank, index, action)}: a schedule holds compute only"
        elif not 0 <= action.stage < stages:
            yield f"{_cell(rank, index, action)}: there are {stages} stages only"
        elif action.microbatch is None or not 0 <= action.microbatch < schedule.microbatches:
            yield f"{_cell(rank, index, action)}: there are {schedule.microbatches} micro-batches only"
        elif schedule.rank_of(action.stage, action.microbatch) != rank:
            owner = schedule.rank_of(action.stage, action.microbatch)
            yield f"{_cell(rank, index, action)}: stage {action.stage} is placed on rank {owner}"


def _bijection(schedule: Schedule) -> Iterator[str]:
    places: dict[Action, list[str]] = defaultdict(list)
    for rank, index, action in _cells(schedule):
        places[action].append(_cell(rank, index, action))
    for action, found in places.items():
        if len(found) > 1:
            yield f"{found[1]}: {action} is there {len(found)} times, first at {found[0]}"
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            have = {op for op in COMPUTE if Action(op, stage, microbatch) in places}
            yield from _incomplete(schedule, stage, microbatch, have)


def _incomplete(schedule: Schedule, stage: int, microbatch: int, have: set[Op]) -> Iterator[str]:
    where = f"rank {schedule.rank_of(stage, microbatch)}, stage {stage}, micro-batch {microbatch}"
    if Op.F not in have:
        yield f"{where}: no forward ({stage}F{microbatch})"
    backwards = have & {Op.B, Op.I, Op.W}
    if not schedule.backward:
        if backwards:
            yield f"{where}: {', '.join(sorted(backwards))} in a schedule of forwards only"
    elif not backwards:
        yield f"{where}: no backward ({stage}B{microbatch})"
    elif Op.B in backwards and len(backwards) > 1:
        yield f"{where}: a full backward (B) and a split one ({', '.join(sorted(backwards - {Op.B}))}) as well"
    elif len(backwards) == 1 and Op.B not in backwards:
        absent = Op.I if Op.W in backwards else Op.W
        yield f"{where}: {next(iter(backwards))} without {absent} ({stage}{absent}{microbatch})"


def _local_order(schedule: Schedule) -> Iterator[str]:
    """F before B, I and R; R before B and I; I before W: all on one rank, so seen from its list alone."""
    before = {Op.R: (Op.F,), Op.B: (Op.F, Op.R), Op.I: (Op.F, Op.R), Op.W: (Op.I,)}
    for rank, row in enumerate(schedule.actions):
        position = {action: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            for op in before.get(action.op, ()):
                first = action._replace(op=op)
                if position.get(first, -1) > index:
                    yield f"{_cell(rank, index, action)}: must come after {first} (cell {position[first]})"


def _joined(schedule: Schedule) -> Iterator[str]:
    """Forwards that are one stand together, in order, on one way through the ranks."""
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.op is not Op.F or action.microbatch is None:
                continue
            together = schedule.joined_with(action.microbatch)
            if action.microbatch != together[0]:
                continue
            expected = tuple(action._replace(microbatch=microbatch) for microbatch in together)
            if row[index : index + len(together)] != expected:
                yield f"{_cell(rank, index, action)}: must be followed by {', '.join(map(str, expected[1:]))}"


def _moves(schedule: Schedule) -> Iterator[str]:
    """What leaves is there by then, and is back before its backward."""
    position = {action: index for row in schedule.actions for index, action in enumerate(row)}
    for move in schedule.moves:
        rank = schedule.rank_of(move.stage, move.microbatch)
        forward, backward = (Action(op, move.stage, move.microbatch) for op in (Op.F, Op.B))
        steps = [position.get(action, -1) for action in (forward, move.leaves, move.returns, backward)]
        own = all(action in schedule.actions[rank] for action in (move.leaves, move.returns))
        if move.host == rank or not own or steps != sorted(steps) or steps[2] == steps[3]:
            yield f"rank {rank}: what {forward} keeps must leave it after that and be back before {backward}"


def _windows(schedule: Schedule) -> Iterator[str]:
    """The optimizer step between two windows must not fall between an F and its B."""
    for rank, row in enumerate(schedule.actions):
        latest = 0
        for index, action in enumerate(row):
            window = schedule.window_of(action.microbatch or 0)
            if window < latest:
                yield f"{_cell(rank, index, action)}: of window {window}, after window {latest} has begun"
            latest = max(latest, window)


def _hangs(view: Schedule | Program) -> Iterator[str]:
    for rank, index, action, missing in walk(view).stuck:
        yield f"{_cell(rank, index, action)}: hangs, because it waits for {missing}, which never gets its turn"


def _messages(program: Program) -> Iterator[str]:
    schedule = program.schedule
    found = Counter((rank, action) for rank, _, action in _cells(program) if action.op in (Op.SEND, Op.RECV))
    expected = Counter(_expected_messages(schedule))
    for rank, action in sorted((expected - found).elements(), key=str):
        yield f"rank {rank}: {action} is missing"
    for rank, action in sorted((found - expected).elements(), key=str):
        yield f"rank {rank}: {action} is one too many"
    sent: dict[tuple[int | None, int | None, str], list[tuple[int, int | None]]] = defaultdict(list)
    received: dict[tuple[int | None, int | None, str], list[tuple[int, int | None]]] = defaultdict(list)
    for rank, _, action in _cells(program):
        if action.op is Op.SEND:
            sent[rank, action.peer, str(action.payload)].append((_receiver(action), action.microbatch))
        elif action.op is Op.RECV:
            received[action.peer, rank, str(action.payload)].append((action.stage, action.microbatch))
    for source, destination, payload in sorted(sent.keys() & received.keys(), key=str):
        if sent[source, destination, payload] != received[source, destination, payload]:
            kind = Payload(payload).name.lower()
            yield f"{kind}s from rank {source} to rank {destination} are received in another order than sent"


def _receiver(send: Action) -> int:
    """The stage that a SEND is for: activations go up, gradients down, a stash stays the stage's."""
    if send.payload is Payload.STASH:
        return send.stage
    return send.stage + 1 if send.payload is Payload.ACTIVATION else send.stage - 1


def _expected_messages(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for move in schedule.moves:
        owner = schedule.rank_of(move.stage, move.microbatch)
        for rank, peer in ((owner, move.host), (move.host, owner)):
            for op in (Op.SEND, Op.RECV):
                yield rank, Action(op, move.stage, move.microbatch, Payload.STASH, peer)
    for microbatch in range(schedule.microbatches):
        for stage in range(schedule.stages - 1):
            low, high = schedule.rank_of(stage, microbatch), schedule.rank_of(stage + 1, microbatch)
            if low == high:
                continue
            yield low, Action(Op.SEND, stage, microbatch, Payload.ACTIVATION, high)
            yield high, Action(Op.RECV, stage + 1, microbatch, Payload.ACTIVATION, low)
            if schedule.backward:
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
    """After a stage's REDUCE of a window no compute of that window; REDUCE, then STEP; then the next window."""
    reduced: set[tuple[int, int]] = set()
    stepped: set[tuple[int, int]] = set()
    for index, action in enumerate(row):
        if action.op is Op.REDUCE:
            reduced.add((action.stage, action.window))
        elif action.op is Op.STEP:
            stepped.add((action.stage, action.window))
            if (action.stage, action.window) not in reduced:
                yield f"{_cell(rank, index, action)}: must come after the REDUCE of its stage"
        elif action.op in COMPUTE and action.microbatch is not None:
            window = schedule.window_of(action.microbatch)
            if (action.stage, window) in stepped:
                yield f"{_cell(rank, index, action)}: sees weights that a STEP of its own window has changed"
            elif (action.stage, window) in reduced:
                yield f"{_cell(rank, index, action)}: comes after the REDUCE of its stage and window"
            elif window and schedule.backward and (action.stage, window - 1) not in stepped:
                yield f"{_cell(rank, index, action)}: comes before the STEP of window {window - 1}"


def _rendezvous(program: Program) -> Iterator[str]:
    """Where every SEND and RECV blocks until both ends are there, all ranks must still reach their end."""
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
            yield f"{_cell(rank, position[rank], action)}: blocks for ever, because rank {action.peer} never meets it"


def _collectives(program: Program) -> Iterator[str]:
    """A group's collectives are matched by their order, so that all of its ranks must start them in the same."""
    schedule = program.schedule
    orders: dict[frozenset[int], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, _, action in _cells(program):
        if action.op is Op.REDUCE:
            holders = frozenset(schedule.placement[row][action.stage] for row in schedule.copies_of(action.stage))
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
