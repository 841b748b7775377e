"""The checker reports whatever is broken, and names the cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.schedule import (
    SPECS,
    Action,
    Costs,
    Op,
    Program,
    Schedule,
    build,
    check,
    check_program,
    lower,
    parse_action,
    problems_of,
    simulate,
)
from runner.schedule.stream import repeat
from runner.schedule.values import COMPUTE

BASE = build("1f1b", ranks=3, microbatches=4)


def _with_row(schedule: Schedule, rank: int, row: list[str]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(parse_action(text) for text in row)
    return replace(schedule, actions=tuple(rows))


def _row(rank: int) -> list[str]:
    return [str(action) for action in BASE.actions[rank]]


def _edited(rank: int, edit: Callable[[list[str]], object]) -> Schedule:
    row = _row(rank)
    edit(row)
    return _with_row(BASE, rank, row)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (_edited(1, lambda row: row.remove("1B2")), "rank 1, stage 1, micro-batch 2: no backward (1B2)"),
        (_edited(1, lambda row: row.remove("1F2")), "rank 1, stage 1, micro-batch 2: no forward (1F2)"),
        (
            _edited(0, lambda row: row.insert(1, "0F0")),
            "rank 0, cell 1 (0F0): 0F0 is there 2 times, first at rank 0, cell 0 (0F0)",
        ),
        (
            _edited(2, lambda row: row.extend(["2I3", "2W3"])),
            "rank 2, stage 2, micro-batch 3: a full backward (B) and a split one (I, W) as well",
        ),
        (
            _edited(2, lambda row: row.__setitem__(-1, "2I3")),
            "rank 2, stage 2, micro-batch 3: I without W (2W3)",
        ),
        (
            _edited(2, lambda row: row.__setitem__(-1, "2W3")),
            "rank 2, stage 2, micro-batch 3: W without I (2I3)",
        ),
        (_edited(2, lambda row: row.append("2R3")), "rank 2, cell 7 (2B3): must come after 2R3 (cell 8)"),
        (_edited(0, lambda row: row.append("1F0")), "rank 0, cell 8 (1F0): stage 1 is placed on rank 1"),
        (_edited(0, lambda row: row.append("5F0")), "rank 0, cell 8 (5F0): there are only 3 stages"),
        (_edited(0, lambda row: row.append("0F4")), "rank 0, cell 8 (0F4): there are only 4 micro-batches"),
        (
            _edited(0, lambda row: row.append("0STEP")),
            "rank 0, cell 8 (0STEP): a schedule may contain only compute and moves",
        ),
        (
            _edited(2, lambda row: row.__setitem__(slice(0, 2), ["2B0", "2F0"])),
            "rank 2, cell 0 (2B0): must come after 2F0 (cell 1)",
        ),
        (
            _edited(2, lambda row: row.__setitem__(slice(6, 8), ["2F3", "2W3", "2I3"])),
            "rank 2, cell 7 (2W3): must come after 2I3 (cell 8)",
        ),
        (
            _with_row(BASE, 0, ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0F3", "0B3"]),
            "rank 0, cell 1 (0B0): hangs, because it waits for 1B0, which never gets its turn",
        ),
        (replace(BASE, placement=((0, 1, 3),)), "placement row 0 must give each of 3 stages a rank below 3"),
        (replace(BASE, pipeline_of_microbatch=(0, 0, 1, 0)), "pipeline_of_microbatch must name rows of the placement"),
        (replace(BASE, window_of_microbatch=(0, 1)), "window_of_microbatch must have one entry for each of 4"),
        (
            replace(BASE, window_of_microbatch=(0, 1, 0, 1)),
            "rank 0, cell 2 (0F2): belongs to window 0, but window 1 has begun",
        ),
        (replace(BASE, backward=False), "rank 0, stage 0, micro-batch 0: B in a schedule of forwards only"),
    ],
)
def test_reports(broken: Schedule, says: str) -> None:
    assert any(defect.startswith(says) for defect in check(broken)), check(broken)


@pytest.mark.parametrize(
    ("last", "makespan"), [(["2B3"], 18), (["2I3", "2W3"], 17), (["2R3", "2B3"], 19), (["2R3", "2I3", "2W3"], 18)]
)
def test_split_and_recomputed_backwards_are_valid(last: list[str], makespan: float) -> None:
    schedule = _with_row(BASE, 2, _row(2)[:-1] + last)
    assert check(schedule) == []
    assert check_program(lower(schedule)) == []
    assert simulate(schedule, Costs()).makespan == makespan


def _change(program: Program, rank: int, edit: Callable[[list[Action]], object]) -> Program:
    """The same edit of the rank's list and of the global order."""
    rows = [list(row) for row in program.actions]
    edit(rows[rank])
    mine = iter(rows[rank])
    order = [(owner, next(mine, action) if owner == rank else action) for owner, action in program.order]
    order += [(rank, action) for action in mine]
    kept = len(rows[rank]) - sum(owner == rank for owner, _ in order)
    while kept < 0:  # the list became shorter: the global order loses its last cells of this rank
        last = max(place for place, (owner, _) in enumerate(order) if owner == rank)
        del order[last]
        kept += 1
    return Program(program.schedule, tuple(map(tuple, rows)), tuple(order))


def _swap(first: str, second: str) -> Callable[[list[Action]], None]:
    def swap(row: list[Action]) -> None:
        one, two = row.index(parse_action(first)), row.index(parse_action(second))
        row[one], row[two] = row[two], row[one]

    return swap


def _drop(text: str) -> Callable[[list[Action]], None]:
    return lambda row: row.remove(parse_action(text))


def _move(text: str, place: int) -> Callable[[list[Action]], None]:
    def move(row: list[Action]) -> None:
        row.remove(parse_action(text))
        row.insert(place, parse_action(text))

    return move


@pytest.mark.parametrize(
    ("rank", "edit", "says"),
    [
        (0, _drop("0SEND_F1>1"), "rank 0: 0SEND_F1>1 is missing"),
        (1, _drop("1RECV_F1<0"), "rank 1: 1RECV_F1<0 is missing"),
        (1, lambda row: row.append(parse_action("1RECV_F1<0")), "rank 1: 1RECV_F1<0 is one too many"),
        (1, _swap("1RECV_F2<0", "1RECV_F3<0"), "activations from rank 0 to rank 1 are received in another order"),
        (0, _swap("0SEND_F0>1", "0SEND_F2>1"), "activations from rank 0 to rank 1 are received in another order"),
        (1, _move("1RECV_F2<0", 0), "activations from rank 0 to rank 1 are received in another order"),
        (0, _move("0RECV_B0<1", 0), "rank 0, cell 0 (0RECV_B0<1): hangs, because it waits for 1SEND_B0>0"),
        (0, _move("0SEND_F0>1", 0), "rank 0, cell 0 (0SEND_F0>1): hangs, because it waits for 0F0"),
        (2, _drop("2STEP"), "rank 2: 2STEP is missing"),
        (2, _drop("2REDUCE"), "rank 2: 2REDUCE is missing"),
        (2, _swap("2STEP", "2REDUCE"), "rank 2, cell 16 (2STEP): must come after the REDUCE of its stage"),
        (2, _swap("2SEND_B3>1", "2REDUCE"), None),
        (2, _swap("2B3", "2REDUCE"), "rank 2, cell 16 (2B3): comes after the REDUCE of its stage and window"),
        (2, _swap("2B3", "2STEP"), "rank 2, cell 17 (2B3): reads weights that the STEP of its own window has changed"),
        (0, _swap("0F0", "0F1"), "the program's compute actions are not its schedule's"),
    ],
)
def test_programs_with_one_fault(rank: int, edit: Callable[[list[Action]], object], says: str | None) -> None:
    program = lower(BASE)
    assert check_program(program) == []
    defects = check_program(_change(program, rank, edit))
    if says is None:
        assert defects == []
    else:
        assert any(defect.startswith(says) for defect in defects), defects


def test_order_must_hold_the_lists() -> None:
    program = lower(BASE)
    broken = replace(program, order=program.order[::-1])
    assert any("no sub-sequence of the global order" in defect for defect in check_program(broken))


def test_a_step_between_forward_and_backward_is_found() -> None:
    """Two windows of which the second starts before the first has stepped."""
    stream = lower(repeat(build("1f1b", ranks=2, microbatches=2), 2))
    row = [action for action in stream.actions[0] if action.op is not Op.STEP]
    late = [*row, *(action for action in stream.actions[0] if action.op is Op.STEP)]
    broken = _change(stream, 0, lambda actions: actions.__setitem__(slice(None), late))
    assert any(defect.endswith("comes before the STEP of window 0") for defect in check_program(broken))


def test_blocking_messages_need_the_global_order() -> None:
    """Receives right before their use and sends right after their content: sound, but not where both block."""
    eager = lower(build("1f1b", ranks=2, microbatches=3))
    rows = []
    for row in eager.actions:
        needed = {(str(a.payload), a.microbatch): a for a in row if a.op is Op.RECV}
        late: list[Action] = []
        for action in row:
            if action.op in COMPUTE and (str(action.op), action.microbatch) in needed:
                late.append(needed[str(action.op), action.microbatch])
            if action.op is not Op.RECV:
                late.append(action)
        rows.append(tuple(late))
    broken = replace(eager, actions=tuple(rows))
    defects = check_program(replace(broken, order=tuple((r, a) for r, row in enumerate(rows) for a in row)))
    assert any("blocks for ever" in defect for defect in defects), defects


@st.composite
def _programs(draw: st.DrawFn) -> Program:
    """Any generated schedule, lowered."""
    name = draw(st.sampled_from([name for name in SPECS if name != "from_file"]))
    ranks = draw(st.integers(2, 4).filter(lambda ranks: SPECS[name].ranks.holds(ranks, ranks)))
    legal = [count for count in range(1, 9) if not problems_of(name, ranks=ranks, microbatches=count)]
    return lower(build(name, ranks=ranks, microbatches=draw(st.sampled_from(legal))))


def _fault(data: st.DataObject, row: list[Action]) -> tuple[str, list[Action]]:
    """One action of the list dropped, doubled, or swapped with another one."""
    cell = data.draw(st.integers(0, len(row) - 1))
    kind = data.draw(st.sampled_from(["drop", "double", "swap"]))
    broken = list(row)
    if kind == "drop":
        del broken[cell]
    elif kind == "double":
        broken.insert(data.draw(st.integers(0, len(row))), row[cell])
    else:
        other = data.draw(st.integers(0, len(row) - 1).filter(lambda place: place != cell))
        broken[cell], broken[other] = broken[other], broken[cell]
        kind = "delay" if _compute(broken) == _compute(row) else "swap"
    return kind, broken


def _compute(row: Sequence[Action]) -> list[Action]:
    return [action for action in row if action.op in COMPUTE]


@settings(max_examples=60, deadline=None)
@given(_programs(), st.data())
def test_any_single_fault_of_a_list_is_found(program: Program, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, program.ranks - 1))
    rows = list(program.actions)
    rows[rank] = tuple(_fault(data, list(rows[rank]))[1])
    assert check_program(replace(program, actions=tuple(rows)))


@settings(max_examples=60, deadline=None)
@given(_programs(), st.data())
def test_a_fault_that_the_global_order_has_too_is_found(program: Program, data: st.DataObject) -> None:
    """But for what leaves a message of another channel earlier or later, and all still arrive."""
    rank = data.draw(st.integers(0, program.ranks - 1))
    kind, row = _fault(data, list(program.actions[rank]))
    broken = _change(program, rank, lambda actions: actions.__setitem__(slice(None), row))
    defects = check_program(broken)
    if kind != "delay":
        assert defects
    elif not defects:
        assert simulate(broken, Costs()).makespan >= 0  # it runs to its end
        channels = [_channels(each.actions[rank]) for each in (program, broken)]
        assert channels[0] == channels[1]


def _channels(row: tuple[Action, ...]) -> dict[object, list[Action]]:
    """The messages of each first-in-first-out queue, in order."""
    found: dict[object, list[Action]] = {}
    for action in row:
        if action.payload is not None:
            found.setdefault((action.op, action.peer, action.payload), []).append(action)
    return found


@settings(max_examples=50, deadline=None)
@given(_programs(), st.data())
def test_cells_dropped_or_doubled_are_found_in_the_schedule(program: Program, data: st.DataObject) -> None:
    """Cells that change places make another order, and without an R the activations are kept: faults if it hangs."""
    schedule = program.schedule
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    kind, row = _fault(data, list(schedule.actions[rank]))
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    broken = replace(schedule, actions=tuple(rows))
    defects = check(broken)
    kept = kind == "drop" and len(_recomputed(broken)) < len(_recomputed(schedule))
    if kind in ("drop", "double") and not kept:
        assert defects
    elif not defects:
        assert check_program(lower(broken)) == []


def _recomputed(schedule: Schedule) -> list[Action]:
    return [action for row in schedule.actions for action in row if action.op is Op.R]
