from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.schedule import (
    SPECS,
    Action,
    Costs,
    Op,
    Schedule,
    StageCosts,
    build,
    check_program,
    forward_only,
    lower,
    parse_action,
    problems_of,
    simulate,
)
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.lowering.program import add_send_recv
from runner.schedule.stream import repeat
from runner.schedule.values import COMPUTE, Payload
from runner.schedule.walk import walk

# Sa0>1: send the activation of micro-batch 0 to rank 1; Rg0<1: receive its gradient from rank 1.
ROUND_ROBIN = """
F0 Sa0>1 F1 Sa1>1 F2 Sa2>1 Rg0<1 B0 F3 Sa3>1 Rg1<1 B1 Rg2<1 B2 Rg3<1 B3
Ra0<0 F0 Sa0>2 Ra1<0 F1 Sa1>2 Rg0<2 Ra2<0 B0 Sg0>0 F2 Sa2>2 Rg1<2 Ra3<0 B1 Sg1>0 F3 Sa3>2 Rg2<2 B2 Sg2>0 Rg3<2 B3 Sg3>0
Ra0<1 F0 Ra1<1 B0 Sg0>1 F1 Ra2<1 B1 Sg1>1 F2 Ra3<1 B2 Sg2>1 F3 B3 Sg3>1
"""
SIMULATED = """
0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0B0 0F3 0SEND_F3>1 0RECV_B1<1 0B1 0RECV_B2<1 0B2 0RECV_B3<1 0B3 0REDUCE 0STEP
1RECV_F0<0 1F0 1SEND_F0>2 1RECV_F1<0 1F1 1SEND_F1>2 1RECV_F2<0 1RECV_B0<2 1B0 1SEND_B0>0 1F2 1SEND_F2>2 1RECV_B1<2 1RECV_F3<0 1B1 1SEND_B1>0 1F3 1SEND_F3>2 1RECV_B2<2 1B2 1SEND_B2>0 1RECV_B3<2 1B3 1SEND_B3>0 1REDUCE 1STEP
2RECV_F0<1 2F0 2RECV_F1<1 2B0 2SEND_B0>1 2F1 2RECV_F2<1 2B1 2SEND_B1>1 2F2 2RECV_F3<1 2B2 2SEND_B2>1 2F3 2B3 2SEND_B3>1 2REDUCE 2STEP
"""  # noqa: E501 - one line is one rank


def _short(text: str) -> str:
    """``1SEND_F0>2`` in the notation of ROUND_ROBIN."""
    body = text[1:]
    for long, short in (("SEND_F", "Sa"), ("SEND_B", "Sg"), ("RECV_F", "Ra"), ("RECV_B", "Rg")):
        body = body.replace(long, short)
    return body


def test_messages_follow_the_order_that_is_given() -> None:
    """The published example: three ranks, one action of each rank in turn."""
    schedule = build("1f1b", ranks=3, microbatches=4)
    order = add_send_recv(schedule, tuple((step.rank, step.action) for step in walk(schedule).steps))
    rows = [" ".join(_short(str(a)) for owner, a in order if owner == rank) for rank in range(3)]
    assert rows == ROUND_ROBIN.strip().splitlines()


def test_program_of_three_ranks() -> None:
    """In simulated time the second rank hears of the third forward (ends at 3) before the first gradient (at 5)."""
    program = lower(build("1f1b", ranks=3, microbatches=4))
    assert [" ".join(map(str, row)) for row in program.actions] == SIMULATED.strip().splitlines()


@st.composite
def _schedules(draw: st.DrawFn) -> Schedule:
    """Any generated schedule of a few ranks."""
    name = draw(st.sampled_from([name for name in SPECS if name != "from_file"]))
    ranks = draw(st.integers(2, 6).filter(lambda ranks: SPECS[name].ranks.holds(ranks, ranks)))
    legal = [count for count in range(1, 13) if not problems_of(name, ranks=ranks, microbatches=count)]
    return build(name, ranks=ranks, microbatches=draw(st.sampled_from(legal)))


@settings(max_examples=60, deadline=None)
@given(_schedules(), st.integers(1, 3), st.sampled_from([(1, 2), (1, 1), (3, 1), (0, 1)]))
def test_programs_are_valid(schedule: Schedule, windows: int, costs: tuple[int, int]) -> None:
    """Also where messages block, where forwards take no time, and over several optimizer steps."""
    stream = repeat(schedule, windows if schedule.windows == 1 else 1)
    program = lower(stream, Costs(F=costs[0], B=costs[1]))
    assert check_program(program) == []
    messages = [action for row in program.actions for action in row if action.op is Op.SEND]
    ways = {Payload.ACTIVATION: schedule.placement[0], Payload.GRADIENT: schedule.rows[-1]}  # edges are alike in all
    for payload, way in ways.items():
        edges = sum(low != high for low, high in pairwise(way))
        sent = [action for action in messages if action.payload is payload]
        assert len(sent) == edges * stream.microbatches


@settings(max_examples=40, deadline=None)
@given(_schedules(), st.floats(0, 3))
def test_a_program_takes_its_schedules_time(schedule: Schedule, comm: float) -> None:
    """Messages of tensors that are lent take the links too, and in a schedule they take no time."""
    costs = Costs(comm=comm)
    span, least = simulate(lower(schedule), costs).makespan, simulate(schedule, costs).makespan
    assert span == pytest.approx(least) or (schedule.moves and span > least)


def test_passes_leave_the_schedule_alone() -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    before = str(schedule)
    program = lower(schedule)
    assert str(schedule) == before
    assert program.schedule is schedule
    assert tuple(tuple(a for a in row if a.op in COMPUTE) for row in program.actions) == schedule.actions


def test_forwards_alone_have_no_update() -> None:
    program = lower(forward_only(3, 2))
    assert check_program(program) == []
    assert {action.op for row in program.actions for action in row} == {Op.F, Op.SEND, Op.RECV}


def test_neighbours_on_one_rank_exchange_no_message() -> None:
    schedule = _zigzag()
    program = lower(schedule)
    assert check_program(program) == []
    texts = [str(action) for row in program.actions for action in row]
    assert "0SEND_F0>1" in texts
    assert not any(text.startswith(("1SEND_F", "2SEND_B")) for text in texts)
    assert texts.index("2REDUCE") < texts.index("1STEP") < texts.index("2STEP")


def _zigzag() -> Schedule:
    rows = ("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    actions = tuple(tuple(parse_action(text) for text in row.split()) for row in rows)
    return Schedule("zigzag", ((0, 1, 1, 0),), (0, 0), actions, chunks=2)


def test_reduce_runs_beside_the_drain_and_step_after_it() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    costs = StageCosts(F=(1, 1), B=(2, 2), comm=(0,), reduce=(1, 5), step=(1, 1))
    times = simulate(lower(schedule), costs)
    program = lower(schedule)
    ends = {str(a): times.end[r][i] for r, row in enumerate(program.actions) for i, a in enumerate(row)}
    assert ends["1B1"] == 7
    assert ends["1REDUCE"] == 12
    assert ends["1STEP"] == 13
    assert ends["0B1"] == 9
    assert ends["0STEP"] == 11
    assert times.makespan == 13
    assert times.busy == (7, 7)


def test_simulation_refuses_what_cannot_run() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    rows = (schedule.actions[0][::-1], schedule.actions[1])
    hanging = Schedule("mine", schedule.placement, schedule.pipeline_of_microbatch, rows)
    with pytest.raises(ValueError, match=r"mine hangs: rank 0 waits at action 0 \(0B1\) for 0F1"):
        simulate(hanging, Costs())
    with pytest.raises(ValueError, match="costs of B: 1 given, 2 needed for 2 stages"):
        simulate(schedule, StageCosts(F=(1, 1), B=(2,)))


def test_a_chunk_costs_its_part() -> None:
    times = simulate(_zigzag(), Costs())
    assert times.makespan == 12
    assert times.busy == (6.0, 6.0)
    assert times.peak_activations == (1.0, 1.0)


def test_unequal_stages() -> None:
    times = simulate(build("1f1b", ranks=2, microbatches=2), StageCosts(F=(1, 3), B=(2, 6), comm=(0.5,)))
    assert times.makespan == 1 + 0.5 + 2 * 9 + 0.5 + 2


def test_backwards_are_fused_where_no_other_rank_waits_for_the_first_part() -> None:
    def row(*actions: str) -> tuple[Action, ...]:
        return tuple(map(parse_action, actions))

    rows = (row("0F0", "3F0", "3I0", "3W0", "0I0", "0W0"), row("1F0", "2F0", "2I0", "2W0", "1I0", "1W0"))
    schedule = Schedule("v", ((0, 1, 1, 0),), (0,), rows, chunks=2)
    assert fuse_backwards(schedule).actions == (
        row("0F0", "3F0", "3I0", "3W0", "0B0"),  # rank 1 waits for 3I0, nobody for 0I0
        row("1F0", "2F0", "2B0", "1I0", "1W0"),  # 1I0 runs after 2W0 anyway, rank 0 waits for it
    )
