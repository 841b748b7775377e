"""The order in which ranks run that take forwards before their turn, by the simulator and its chance."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from plan_profiles import layer, model

from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import in_flight_microbatches, predict_memory
from runner.plan.stages.figures import stage_figures
from runner.schedule import Costs, Op, Schedule, build, check, check_program, lower, problems_of, simulate
from runner.schedule.simulation.clock import Jitter
from runner.schedule.simulation.opportunistic import hurried, realised, take_forward
from runner.schedule.values import COMPUTE, Program


def opportunistic(ranks: int, microbatches: int, limit: int | None = None) -> Schedule:
    return build("varuna", ranks=ranks, microbatches=microbatches, opportunistic=True, memory_limit=limit)


def as_run(program: Program, order: Schedule) -> Program:
    """A program with its forwards taken where an order has them; its messages go with them, and only these."""
    rows = []
    for row, wanted in zip(map(list, program.actions), order.actions, strict=True):
        at = 0
        for action in wanted:
            while row[at].op not in COMPUTE:
                at += 1
            if row[at] != action:
                assert take_forward(row, at, program.schedule.ahead) == action
                at = row.index(action)
            at += 1
        rows.append(tuple(row))
    return replace(program, schedule=replace(program.schedule, ahead=0), actions=tuple(rows))


@pytest.mark.parametrize(("ranks", "microbatches", "limit"), [(2, 5, None), (4, 8, None), (4, 9, 3)])
def test_what_chance_makes_of_the_order_is_valid_and_within_what_is_planned(
    ranks: int, microbatches: int, limit: int | None
) -> None:
    schedule = opportunistic(ranks, microbatches, limit)
    profile = model([layer() for _ in range(ranks)])
    figures = stage_figures(profile, [(s, s) for s in range(ranks)])
    planned = predict_memory(lower(schedule), profile, figures, MemoryNeeds(microbatches)).peak_bytes
    orders = set()
    for seed in range(6):
        jitter = Jitter(1.0, seed)
        order = realised(schedule, Costs(comm=0.5), jitter)
        assert check(order) == []
        assert check_program(lower(order)) == []
        assert simulate(order, Costs(comm=0.5), jitter).makespan > 0
        in_order = replace(order, ahead=0)
        held = predict_memory(as_run(lower(schedule), order), profile, figures, MemoryNeeds(microbatches)).peak_bytes
        assert all(one <= most for one, most in zip(held, planned, strict=True))
        assert all(
            one <= most
            for one, most in zip(in_flight_microbatches(in_order), in_flight_microbatches(schedule), strict=True)
        )
        for rank, row in enumerate(order.actions):
            for op in (Op.F, Op.R, Op.B):
                assert [a for a in row if a.op is op] == [a for a in schedule.actions[rank] if a.op is op]
        orders.add(order.actions)
    assert len(orders) > 1


def test_the_order_that_holds_most_runs_all_forwards_first() -> None:
    rows = hurried(opportunistic(3, 4))
    assert [str(action) for action in rows[0]][:6] == ["0F0", "0F1", "0F2", "0F3", "0R0", "0B0"]
    assert rows[2] == opportunistic(3, 4).actions[2], "the last rank waits for no gradient"
    static = build("varuna", ranks=3, microbatches=4)
    assert hurried(static) == static.actions
    assert realised(static, Costs(comm=1)) is static


def test_late_messages_reorder_without_chance_and_save_time() -> None:
    schedule = opportunistic(4, 16)
    slow = Costs(comm=1.0)
    assert simulate(realised(schedule, slow), slow).makespan < simulate(schedule, slow).makespan


def test_chance_is_a_function_of_the_seed_and_the_action_alone() -> None:
    action = build("1f1b", ranks=2, microbatches=1).actions[0][0]
    factors = [Jitter(0.5, seed).factor(action) for seed in range(2000)]
    assert Jitter(0.5, 7).factor(action) == factors[7]
    assert min(factors) >= 1.0
    assert statistics.mean(factors) == pytest.approx(1.5, rel=0.05)
    assert Jitter(0.5, 7).factor(action, message=True) != factors[7]


def test_refusals() -> None:
    (problem,) = problems_of("1f1b", ranks=2, microbatches=2, opportunistic=True)
    assert problem.line() == (
        "schedule.opportunistic = true: applies to schedule=varuna only. The other schedules are run in their order. "
        "Try schedule.opportunistic=null."
    )
    (problem,) = problems_of("varuna", ranks=2, microbatches=2, memory_limit=2)
    assert problem.line().startswith("schedule.memory_limit = 2: needs schedule.opportunistic=true.")
