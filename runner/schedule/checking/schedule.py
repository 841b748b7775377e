"""Checks that a schedule can run, and that it computes everything that a step needs, once and in a valid order.

Every defect is one readable line that names the rank, the cell and the action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from runner.schedule.values import COMPUTE, MOVES, Action, Op, Program, Schedule
from runner.schedule.walk import walk

__all__ = ["cell", "cells", "check", "hangs", "why_of"]


def check(schedule: Schedule) -> list[str]:
    """All defects of a schedule; an empty list means that it is valid.

    Shape: rows and tables agree, and every cell is an action of a stage on this rank. Completeness: each stage and
    micro-batch has exactly one F, and either exactly one B or exactly one I and one W; every fill of the schedule's
    filling is there once. Order: F comes before B, and F before I before W; forwards that are run together are
    neighbours. Versions: a rank starts no window before it has ended the one before, unless windows overlap. Deadlock:
    all ranks reach the end of their lists.
    """
    defects = [*_shape(schedule)]
    if defects:
        return defects  # the other checks would look up stages and micro-batches that do not exist
    defects += [
        *_bijection(schedule),
        *_local_order(schedule),
        *_joined(schedule),
        *_moves(schedule),
        *_windows(schedule),
        *_fills(schedule),
    ]
    return defects or [*hangs(schedule)]  # a schedule with missing or misplaced actions would hang anyway


def why_of(defect: str) -> str:
    """How a defect that names a cell counts it, for people who count the lines of a file from 1; else empty."""
    return "Ranks and cells count from 0, without blank cells" if ", cell " in defect else ""


def cell(rank: int, index: int, action: Action | str) -> str:
    """The place of an action, as text for the line of a defect."""
    return f"rank {rank}, cell {index} ({action})"


def cells(view: Schedule | Program) -> Iterator[tuple[int, int, Action]]:
    """Yield every action as (rank, index in its list, action)."""
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
        yield (
            f"the number of micro-batches ({schedule.microbatches}) must be a multiple of joined ({schedule.joined}), "
            f"and joined a multiple of parts ({schedule.parts})"
        )
        return
    if schedule.window_of_microbatch and len(schedule.window_of_microbatch) != schedule.microbatches:
        yield f"window_of_microbatch must have one entry for each of {schedule.microbatches} micro-batches"
        return
    for rank, index, action in cells(schedule):
        if action.op not in COMPUTE | MOVES:
            yield f"{cell(rank, index, action)}: a schedule may contain only compute and moves"
        elif not 0 <= action.stage < stages:
            yield f"{cell(rank, index, action)}: there are only {stages} stages"
        elif action.op is Op.FILL:
            yield from _misplaced_fill(schedule, rank, index, action)
        elif action.microbatch is None or not 0 <= action.microbatch < schedule.microbatches:
            yield f"{cell(rank, index, action)}: there are only {schedule.microbatches} micro-batches"
        elif schedule.rank_of(action.stage, action.microbatch, action.op) != rank:
            owner = schedule.rank_of(action.stage, action.microbatch, action.op)
            yield f"{cell(rank, index, action)}: stage {action.stage} is placed on rank {owner}"


def _misplaced_fill(schedule: Schedule, rank: int, index: int, action: Action) -> Iterator[str]:
    """Check that a fill has a kind of the schedule's filling, is on its stage's rank, and has a fitting micro-batch."""
    where, owner = cell(rank, index, action), schedule.placement[0][action.stage]
    kinds = {kind.name: kind for kind in schedule.filling.kinds} if schedule.filling is not None else {}
    kind = kinds.get(action.work)
    if kind is None:
        yield f"{where}: {schedule.name} is filled with {', '.join(kinds) or 'nothing'}"
    elif action.microbatch not in (schedule.microbatches_of_window(0) if kind.of_microbatch else (None,)):
        yield f"{where}: {kind.rule}"
    if not 0 <= action.window < schedule.windows:
        yield f"{where}: there are only {schedule.windows} windows"
    if owner != rank or len(schedule.copies_of(action.stage)) > 1:
        yield f"{where}: stage {action.stage} must be on this rank, and on no other"


def _fills(schedule: Schedule) -> Iterator[str]:
    """Check that every fill is there once: for each stage and, by its kind, each micro-batch of the first window."""
    if schedule.filling is None:
        return
    for stage in range(schedule.stages):
        for kind in schedule.filling.kinds:
            found = [action.microbatch for action in schedule.fills_of(kind.name, stage)]
            wanted = schedule.microbatches_of_window(0) if kind.of_microbatch else (None,)
            for microbatch in wanted:
                if found.count(microbatch) != 1:
                    fill = Action(Op.FILL, stage, microbatch, fill=kind.name)
                    yield f"stage {stage}: {fill} is there {found.count(microbatch)} times"


def _bijection(schedule: Schedule) -> Iterator[str]:
    places: dict[Action, list[str]] = defaultdict(list)
    for rank, index, action in cells(schedule):
        places[action].append(cell(rank, index, action))
    for action, found in places.items():
        if len(found) > 1:
            yield f"{found[1]}: {action} is there {len(found)} times, first at {found[0]}"
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            have = {op for op in COMPUTE if Action(op, stage, microbatch) in places}
            yield from _incomplete(schedule, stage, microbatch, have)


def _incomplete(schedule: Schedule, stage: int, microbatch: int, have: set[Op]) -> Iterator[str]:
    where = f"rank {schedule.rank_of(stage, microbatch)}, stage {stage}, micro-batch {microbatch}"
    if schedule.backward and schedule.has_other_backward(stage) and Op.R not in have:
        yield f"{where}: no recomputation ({stage}R{microbatch}) where the backward is on another rank"
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
    """Check that F comes before B, I and R, R before B and I, and I before W, if they are in the list of one rank."""
    before = {Op.R: (Op.F,), Op.B: (Op.F, Op.R), Op.I: (Op.F, Op.R), Op.W: (Op.I,)}
    for rank, row in enumerate(schedule.actions):
        position = {action: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            for op in before.get(action.op, ()):
                first = action._replace(op=op)
                if position.get(first, -1) > index:
                    yield f"{cell(rank, index, action)}: must come after {first} (cell {position[first]})"


def _joined(schedule: Schedule) -> Iterator[str]:
    """Check that forwards that are run together are neighbours in the list, in the order of their micro-batches."""
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.op is not Op.F or action.microbatch is None:
                continue
            together = schedule.joined_with(action.microbatch)
            if action.microbatch != together[0]:
                continue
            expected = tuple(action._replace(microbatch=microbatch) for microbatch in together)
            if row[index : index + len(together)] != expected:
                yield f"{cell(rank, index, action)}: must be followed by {', '.join(map(str, expected[1:]))}"


def _moves(schedule: Schedule) -> Iterator[str]:
    """Check that tensors leave after the forward that makes them, and are back before their backward."""
    position = {action: index for row in schedule.actions for index, action in enumerate(row)}
    for rank, index, action in cells(schedule):
        if action.op not in MOVES:
            continue
        forward, backward = (Action(op, action.stage, action.microbatch) for op in (Op.F, Op.B))
        ends = [action._replace(op=op) for op in (Op.OUT, Op.IN)]
        steps = [position.get(each, -1) for each in (forward, *ends, backward)]
        if action.peer == rank or -1 in steps or steps != sorted(steps):
            rule = f"the tensors that {forward} keeps must leave its rank after it and be back before {backward}"
            yield f"{cell(rank, index, action)}: {rule}"


def _windows(schedule: Schedule) -> Iterator[str]:
    """Check that a rank ends each window before it begins the next, so that no update lies between an F and its B.

    If windows overlap, check instead that the weights that a forward reads have been made, and that each stage sums the
    gradients of one window at a time.
    """
    if schedule.is_asynchronous:
        yield from _overlapping_windows(schedule)
        return
    for rank, row in enumerate(schedule.actions):
        latest = 0
        for index, action in enumerate(row):
            window = schedule.window_at(action)
            if window < latest:
                yield f"{cell(rank, index, action)}: belongs to window {window}, but window {latest} has begun"
            latest = max(latest, window)


def _overlapping_windows(schedule: Schedule) -> Iterator[str]:
    """Each stage's gradients come window by window, and what is read has been made; see :class:`Schedule`."""
    for rank, row in enumerate(schedule.actions):
        left: dict[tuple[int, int], int] = defaultdict(int)  # stage, window -> weight gradients to come
        for action in row:
            if action.op in (Op.B, Op.W):
                left[action.stage, schedule.window_at(action)] += 1
        for index, action in enumerate(row):
            stage, window = action.stage, schedule.window_at(action)
            version = 0
            if action.microbatch is not None:
                version = schedule.version_read(stage, action.microbatch, action.op)
            if version and left[stage, version - 1]:
                yield f"{cell(rank, index, action)}: reads version {version} of its weights before it is made"
            if schedule.reads_newest and (stage, version) in left and not left[stage, version]:
                yield f"{cell(rank, index, action)}: reads version {version} of its weights, which is not the newest"
            if action.op in (Op.B, Op.W):
                left[stage, window] -= 1
                if window and left[stage, window - 1]:
                    where = cell(rank, index, action)
                    yield f"{where}: belongs to window {window}, but window {window - 1} has not ended"


def hangs(view: Schedule | Program) -> Iterator[str]:
    """The defects of ranks that never reach the end of their lists."""
    for rank, index, action, missing in walk(view).stuck:
        yield f"{cell(rank, index, action)}: hangs, because it waits for {missing}, which never gets its turn"
