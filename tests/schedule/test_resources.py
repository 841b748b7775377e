"""The lowered program on its resources: ranks, links and reductions."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from runner.schedule.catalogue.registry import NAMES, SPECS, build, problems_of
from runner.schedule.liveness import most_at_once, weight_lifetimes
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Jitter, Simulation, StageCosts, simulate
from runner.schedule.steady import period
from runner.schedule.stream import versions_held
from runner.schedule.values import COMPUTE, Action, Op, Payload, Schedule, parse_action

SCHEDULES = [name for name in NAMES if name != "from_file"]
SIZES = [(2, 8), (4, 8), (6, 12)]


def sizes_of(name: str) -> list[tuple[int, int]]:
    return [size for size in SIZES if not problems_of(name, ranks=size[0], microbatches=size[1])]


def any_costs(schedule: Schedule, seed: int) -> StageCosts:
    """Every stage, edge and message takes a time of chance."""
    chance = random.Random(seed)

    def each(count: int, most: float) -> list[float]:
        return [chance.uniform(0.1, most) for _ in range(count)]

    stages, comm = schedule.stages, each(schedule.stages - 1, 0.5)
    return StageCosts(
        F=each(stages, 1.0),
        B=each(stages, 2.0),
        I=each(stages, 1.0),
        W=each(stages, 1.0),
        comm=comm,
        reduce=each(stages, 3.0),
        step=each(stages, 0.5),
        fills={kind: each(stages, 0.5) for kind in ("CURV_A", "CURV_B", "INV_A", "INV_B")},
        stash=each(stages, 0.7),
        occupancy=[chance.uniform(0.5, 1.0) * cost for cost in comm],
    )


def moments(played: Simulation) -> dict[Action, tuple[int, float, float]]:
    """Every action's rank, start and end."""
    return {
        action: (rank, start, end)
        for rank, row in enumerate(played.view.actions)
        for action, start, end in zip(row, played.start[rank], played.end[rank], strict=True)
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_take_their_time_and_links_carry_one_at_a_time(name: str) -> None:
    ranks, microbatches = sizes_of(name)[0]
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    costs = any_costs(schedule, seed=ranks + microbatches)
    played = simulate(lower(schedule), costs)
    found = moments(played)
    on_link: dict[tuple[int, int | None], list[tuple[float, float]]] = defaultdict(list)
    for action, (rank, start, end) in found.items():
        if action.op is Op.SEND:
            edge = action.stage - (action.payload is Payload.GRADIENT)
            stash = action.payload is Payload.STASH
            takes = costs.stash[action.stage] if stash else costs.comm[edge]
            assert end == pytest.approx(start + takes)
            on_link[rank, action.peer].append((start, start + (takes if stash else costs.occupancy[edge])))
        if action.op is Op.RECV:
            assert end >= found[sender_of(schedule, action)][2], "it is not there before it was sent"
    for times in on_link.values():
        times.sort()
        assert all(first[1] <= second[0] + 1e-12 for first, second in zip(times, times[1:], strict=False))


def sender_of(schedule: Schedule, receive: Action) -> Action:
    """The SEND whose message an action receives."""
    stage, microbatch, payload = receive.stage, receive.microbatch, receive.payload
    assert microbatch is not None
    if payload is Payload.STASH:
        owner, host = schedule.rank_of(stage, microbatch), schedule.host_of(stage, microbatch)
        return receive._replace(op=Op.SEND, peer=owner if receive.peer == host else host)
    source = stage + 1 if payload is Payload.GRADIENT else stage - 1
    op = Op.F if payload is Payload.ACTIVATION else Op.B
    return Action(Op.SEND, source, microbatch, payload, schedule.rank_of(stage, microbatch, op))


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_do_one_thing_at_a_time_and_reductions_meet(name: str) -> None:
    ranks, microbatches = sizes_of(name)[-1]
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    played = simulate(lower(schedule), any_costs(schedule, seed=1))
    found = moments(played)
    for rank, row in enumerate(played.view.actions):
        for ops in (COMPUTE | {Op.STEP}, {Op.REDUCE}):
            times = sorted(found[action][1:] for action in row if action.op in ops)
            assert all(first[1] <= second[0] + 1e-12 for first, second in zip(times, times[1:], strict=False)), rank
    for action, (_, start, end) in found.items():
        if action.op is Op.REDUCE:
            copies = [action._replace(row=copy) for copy in schedule.copies_of(action.stage)]
            assert {found[copy][1:] for copy in copies} == {(start, end)}, "all copies reduce together"


def end_of_step(schedule: Schedule, costs: StageCosts) -> float:
    """By the compute alone: stages are reduced after their last backward, one after the other; then all are stepped."""
    played = simulate(schedule, costs)
    last: dict[int, float] = defaultdict(float)
    for actions, ends in zip(schedule.actions, played.end, strict=True):
        for action, end in zip(actions, ends, strict=True):
            if action.op in (Op.B, Op.W):
                last[action.stage] = max(last[action.stage], end)
    finish = []
    for rank in range(schedule.ranks):
        moment = 0.0
        for stage in sorted(schedule.stages_of(rank), key=lambda stage: last[stage]):
            moment = max(moment, last[stage]) + costs.reduce[stage]
        finish.append(moment + sum(costs.step[stage] for stage in schedule.stages_of(rank)))
    return max(finish)


PLAYED_APART = {
    "bpipe",  # whose stashes the compute alone does not know
    "pipefisher",  # a stream: its steps and reductions stand between windows
    "pipefb",  # its ranks share stages in a ring, so that a reduction may wait for another rank's reduction before it
}
STREAMS = {  # their steps stand between windows
    name for name, spec in SPECS.items() if spec.kind == "asynchronous" and not spec.averaged_pipes
}


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - PLAYED_APART - STREAMS))
def test_a_flushed_step_ends_when_compute_reductions_and_steps_have(name: str) -> None:
    for seed, (ranks, microbatches) in enumerate(sizes_of(name)):
        schedule = build(name, ranks=ranks, microbatches=microbatches)
        costs = replace(any_costs(schedule, seed), occupancy=())
        played = simulate(lower(schedule, costs), costs)
        assert played.last({Op.STEP}) == pytest.approx(end_of_step(schedule, costs), rel=1e-12, abs=0.0)
        alone = simulate(schedule, costs)
        assert played.computing == pytest.approx(alone.busy, rel=1e-12)
        assert played.last(COMPUTE) == pytest.approx(alone.makespan, rel=1e-12)


@pytest.mark.parametrize("name", sorted(PLAYED_APART))
def test_those_that_are_played_apart_agree_where_the_difference_costs_nothing(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    costs = replace(any_costs(schedule, seed=2), occupancy=(), stash=(), reduce=(0.0,) * 4, step=(0.0,) * 4)
    played = simulate(lower(schedule, costs), costs)
    assert played.makespan == pytest.approx(simulate(schedule, costs).makespan, rel=1e-12)


def test_chance_meets_a_message_alike_with_and_without_its_program() -> None:
    schedule = build("1f1b", ranks=4, microbatches=6)
    costs = replace(any_costs(schedule, seed=4), occupancy=(), reduce=(), step=())
    for seed in range(3):
        jitter = Jitter(0.5, seed)
        played = simulate(lower(schedule), costs, jitter).last(COMPUTE)
        assert played == pytest.approx(simulate(schedule, costs, jitter).makespan, rel=1e-12)


LENT = ("0F0 0F1 0OUT0>1 0IN0<1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_lending_by_hand() -> None:
    """F 1, B 2, messages free; what stage 0 keeps of a micro-batch takes 0.5 to rank 1, and 0.5 back.

    Without stashes: rank 0 runs F0 0-1, F1 1-2, B0 4-6, B1 7-9; rank 1 F0 1-2, B0 2-4, F1 4-5, B1 5-7. In rank 1's list
    the stash goes back before B0. It leaves rank 0 from 2 to 2.5 and rank 1 from 2.5 to 3; so B0 runs 3-5 there, and
    all that follows is one second late.
    """
    rows = tuple(tuple(map(parse_action, row.split())) for row in LENT)
    program = lower(Schedule("lending", ((0, 1),), (0, 0), rows))
    costs = StageCosts(F=(1, 1), B=(2, 2), comm=(0.0,), stash=(0.5, 0.0))
    found = {str(action): times for action, times in moments(simulate(program, costs)).items()}
    assert (found["0SEND_S0>1"], found["0SEND_S0>0"]) == ((0, 2.0, 2.5), (1, 2.5, 3.0))
    assert (found["1B0"], found["1B1"]) == ((1, 3.0, 5.0), (1, 6.0, 8.0))
    assert (found["0B0"], found["0B1"]) == ((0, 5.0, 7.0), (0, 8.0, 10.0))
    assert simulate(program, replace(costs, stash=())).makespan == 9


def test_the_time_of_bpipe_rises_with_the_moved_bytes() -> None:
    schedule = build("bpipe", ranks=4, microbatches=8)
    program = lower(schedule)
    spans = []
    for stash in (0.0, 0.1, 0.2, 0.4, 0.8):
        costs = StageCosts(F=(1,) * 4, B=(2,) * 4, comm=(0.0,) * 3, stash=(stash,) * 4)
        spans.append(simulate(program, costs).makespan)
    assert spans[0] == simulate(schedule, StageCosts(F=(1,) * 4, B=(2,) * 4)).makespan == 33
    assert spans == sorted(set(spans)), "more bytes, more time"
    assert spans[-1] - spans[0] <= 2 * 0.8 * sum(move.stage == 0 for move in schedule.moves) + 1e-12


def test_two_messages_on_one_link_follow_each_other() -> None:
    """Both forwards end at once, as one; the second output leaves when the first has been carried."""
    rows = tuple(tuple(map(parse_action, row.split())) for row in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    program = lower(Schedule("joined", ((0, 1),), (0, 0), rows, joined=2))
    costs = StageCosts(F=(1, 1), B=(2, 2), comm=(0.75,), occupancy=(0.5,))
    found = {str(action): times[1:] for action, times in moments(simulate(program, costs)).items()}
    assert (found["0SEND_F0>1"], found["0SEND_F1>1"]) == ((2.0, 2.75), (2.5, 3.25))
    free = {str(a): t[1:] for a, t in moments(simulate(program, replace(costs, occupancy=()))).items()}
    assert free["0SEND_F0>1"] == free["0SEND_F1>1"] == (2.0, 2.75)


def test_reductions_begin_when_all_copies_are_ready_and_step_waits_for_all_of_them() -> None:
    schedule = build("chimera", ranks=2, microbatches=2)
    costs = StageCosts(F=(1, 3), B=(2, 6), reduce=(4, 5), step=(1, 1))
    found = moments(simulate(lower(schedule), costs))
    reduces = {action: times for action, times in found.items() if action.op is Op.REDUCE}
    for action in reduces:
        ready = [end for other, (_, _, end) in found.items() if other.op is Op.B and other.stage == action.stage]
        assert reduces[action][1] >= max(ready)
    ends = max(times[2] for times in reduces.values())
    assert all(times[1] >= ends for action, times in found.items() if action.op is Op.STEP)


def test_the_optimizers_step_is_no_idle_time() -> None:
    """F 1, B 2, STEP 3: each of two ranks works for 9 of 12 seconds, and waits for the other one for 3."""
    costs = StageCosts(F=(1, 1), B=(2, 2), step=(3, 3))
    played = simulate(lower(build("1f1b", ranks=2, microbatches=2)), costs)
    assert played.makespan == 12
    assert played.bubble_ratio == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "gpipe"])
def test_a_period_of_the_program_has_its_steps(name: str) -> None:
    """With equal stages each rank's step makes the period so much longer; without reductions and steps it is the
    compute's."""
    schedule = build(name, ranks=4, microbatches=8)
    free = StageCosts(**dict.fromkeys(("F", "B", "I", "W"), (1.0,) * schedule.stages))  # type: ignore[arg-type]
    stepping = replace(free, step=(0.25,) * schedule.stages)
    assert period(lower(schedule), free) == pytest.approx(period(schedule, free), rel=1e-12)
    assert period(lower(schedule), stepping) == pytest.approx(period(schedule, free) + 0.25 * schedule.chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_live_as_long_as_somebody_reads_them(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    for view in (schedule, lower(schedule)):
        held = [most_at_once(row, living) for row, living in zip(view.actions, weight_lifetimes(view), strict=True)]
        assert tuple(count / schedule.chunks for count in held) == versions_held(schedule)


def test_costs_must_cover_the_stages() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="costs of a stash: 1 given, 2 needed"):
        simulate(schedule, StageCosts(F=(1, 1), B=(2, 2), stash=(1,)))
