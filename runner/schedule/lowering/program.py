"""Lowers a schedule to a program, by pure passes over one global order of ``(rank, action)``.

The list of every rank is a sub-sequence of that order, and both ends of a message are next to each other in it. So no
program can deadlock, even if SEND and RECV block: both ranks of the first unfinished message always wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from runner.schedule.remembered import remembered
from runner.schedule.simulation.clock import Costs, StageCosts, play
from runner.schedule.values import MOVES, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import Step, walk

__all__ = ["Order", "add_reduce", "add_send_recv", "add_step", "lower", "simulated_order"]

Order = tuple[tuple[int, Action], ...]
"""One global order of ``(rank, action)``."""


def lower(schedule: Schedule, costs: Costs | StageCosts | None = None) -> Program:
    """Make the program of ``schedule``: its compute with SEND, RECV, REDUCE and STEP.

    Args:
        schedule: a valid schedule; see :func:`runner.schedule.checking.schedule.check`.
        costs: durations that decide when messages are expected; the default has B = 2 F.

    Raises:
        ValueError: the schedule cannot run to its end.
    """
    return _usually_lowered(schedule) if costs is None else _lowered(schedule, costs)


@remembered
def _usually_lowered(schedule: Schedule) -> Program:
    return _lowered(schedule, Costs())


def _lowered(schedule: Schedule, costs: Costs | StageCosts) -> Program:
    order = simulated_order(schedule, costs)
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
    """All compute, in the order in which it ends in a simulation.

    A message then comes where its content exists, and its RECV before the actions that its rank ends later, so that
    receives are posted early enough to overlap with compute, and no earlier. If stages have copies, the STEP of each
    copy waits for all of them; therefore all compute of a window comes before that of the next. Where windows overlap,
    only the compute that follows the STEP in the lists of these ranks does.
    """
    walked = walk(schedule)
    times = play(schedule, walked, costs)
    has_copies = len(schedule.rows) > 1
    if schedule.is_asynchronous and any(len(schedule.copies_of(stage)) > 1 for stage in range(schedule.stages)):
        return tuple(_stepping_together(schedule, walked.steps, times.end))

    def moment(step: Step) -> tuple[int, float]:
        window = schedule.window_at(step.action) if has_copies else 0
        return window, times.end[step.rank][step.cell]

    steps = sorted(walked.steps, key=moment)
    return tuple((step.rank, step.action) for step in steps)  # a stable sort of a topological order stays topological


def _stepping_together(
    schedule: Schedule, steps: Sequence[Step], ends: Sequence[Sequence[float]]
) -> Iterator[tuple[int, Action]]:
    """The compute of a stream whose copies of a stage make their optimizer steps together.

    Args:
        schedule: an asynchronous schedule.
        steps: all of its compute, each rank's in order.
        ends: the end of each action, by rank and place in its list, if no copy waits for another.

    Raises:
        ValueError: ranks would wait for each other.
    """
    queues = [deque(step for step in steps if step.rank == rank) for rank in range(schedule.ranks)]
    last = {(step.rank, step.action.stage, schedule.window_at(step.action)): step.action for step in steps}
    unfinished = Counter((stage, window) for _, stage, window in last)
    waits: list[tuple[int, int] | None] = [None] * schedule.ranks  # the stage and window of the STEP that comes next
    done: set[Action] = set()
    for _ in steps:
        ready = [
            queue[0]
            for rank, queue in enumerate(queues)
            if queue and not unfinished[waits[rank] or (-1, -1)] and done.issuperset(queue[0].waits_for)
        ]
        if not ready:
            raise ValueError(f"{schedule.name}: copies of a stage wait for each other")
        rank, _, action, _ = min(ready, key=lambda step: ends[step.rank][step.cell])
        queues[rank].popleft()
        done.add(action)
        of = action.stage, schedule.window_at(action)
        waits[rank] = None
        if last[rank, *of] == action:
            unfinished[of] -= 1
            waits[rank] = of
        yield rank, action


def add_send_recv(schedule: Schedule, order: Order) -> Order:
    """Add, after each action whose result another rank needs, the SEND and directly after it the peer's RECV.

    Neighbouring stages on one rank need no message. Each move is replaced by the message that does it.

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
    """The message by which the tensors of a move go to the rank that hosts them, or come back from there."""
    assert move.peer is not None  # every move names the rank that keeps the tensors
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
            return  # the outputs of joined forwards leave together, after the last of them
    for microbatch in leaving:
        for payload, to_stage, peer in _made(schedule, action._replace(microbatch=microbatch)):
            if peer != rank:
                yield rank, Action(Op.SEND, action.stage, microbatch, payload, peer)
                yield peer, Action(Op.RECV, to_stage, microbatch, payload, rank)


def _made(schedule: Schedule, action: Action) -> Iterator[tuple[Payload, int, int]]:
    """The tensors that an action makes for other stages: payload, the stage that needs it, and that stage's rank."""
    stage, microbatch = action.stage, action.microbatch
    assert microbatch is not None  # the caller has set it
    if action.op is Op.F and stage + 1 < schedule.stages:
        yield Payload.ACTIVATION, stage + 1, schedule.rank_of(stage + 1, microbatch)
        if schedule.backward and schedule.has_other_backward(stage + 1):
            yield Payload.INPUT, stage + 1, schedule.rank_of(stage + 1, microbatch, Op.R)
    elif action.op in (Op.B, Op.I) and stage > 0:
        yield Payload.GRADIENT, stage - 1, schedule.rank_of(stage - 1, microbatch, Op.B)


def add_reduce(schedule: Schedule, order: Order) -> Order:
    """Add the REDUCE of each stage and window after its last compute, on each rank that holds the stage.

    Ranks that have several stages in common reduce these in the same order, as collectives require; a stage waits for
    the stages before it in this order. This pass comes before :func:`add_send_recv`, so that a gradient for which
    another rank waits is sent before the REDUCE.
    """
    last: dict[tuple[int, int, int], int] = {}
    for position, (rank, action) in enumerate(order):
        if action.op is not Op.FILL and action.op not in MOVES:
            last[rank, action.stage, schedule.window_at(action)] = position
    ends: dict[tuple[int, int], int] = defaultdict(int)  # stage, window -> position where its last copy has ended
    for (_, stage, window), position in last.items():
        ends[stage, window] = max(ends[stage, window], position)
    due: dict[int, list[Action]] = defaultdict(list)
    turn: dict[int, int] = defaultdict(int)  # rank -> position of its latest REDUCE of a stage with copies
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
    """Add the STEPs of all stages of a rank together, after the rank's last REDUCE of the window.

    They are together because the gradient norm that clips them is known only when all stages are reduced. They come
    after the window's fills, whose results are then used at once, and after its messages with stashes.

    In an asynchronous schedule, the STEP of each stage directly follows its REDUCE, the last one if it has copies,
    because later forwards may wait for its weights.
    """
    if schedule.is_asynchronous:
        return tuple(_stepping_by_itself(schedule, order))
    last: dict[tuple[int, int], int] = {}
    for position, (rank, action) in enumerate(order):
        if action.op is Op.REDUCE or action.op is Op.FILL:
            last[rank, action.window] = position
        elif action.payload is Payload.STASH and action.microbatch is not None:
            window = schedule.window_of(action.microbatch)
            last[rank, window] = position  # the stash's owner waits for it, and at STEP this rank waits for the owner
    due = {position: window for (_, window), position in last.items()}

    def extended() -> Iterator[tuple[int, Action]]:
        for position, (rank, action) in enumerate(order):
            yield rank, action
            if position in due:
                for stage in schedule.stages_of(rank):
                    yield rank, Action(Op.STEP, stage, window=due[position], row=schedule.copy_on(rank, stage))

    return tuple(extended())


def _stepping_by_itself(schedule: Schedule, order: Order) -> Iterator[tuple[int, Action]]:
    due: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, action in order:
        yield rank, action
        if action.op is Op.REDUCE:
            steps = due[action.stage, action.window]
            steps.append((rank, action._replace(op=Op.STEP)))
            if len(steps) == len(schedule.copies_of(action.stage)):
                yield from steps
