"""Orders with stages on several ranks: where micro-batches run, how long it takes, and what is refused."""

from __future__ import annotations

import pytest

from runner.schedule.catalogue import registry
from runner.schedule.checking.program import check_program
from runner.schedule.checking.schedule import check
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import StageCosts, simulate
from runner.schedule.stream import streams_of
from runner.schedule.values import Op


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("replicas", "microbatches"), [((2, 1), 6), ((2, 1, 3), 12), ((1, 2), 2), ((3, 1), 7)])
def test_each_replica_takes_its_turn(name: str, replicas: tuple[int, ...], microbatches: int) -> None:
    schedule = registry.build(name, ranks=sum(replicas), microbatches=microbatches, replicas=replicas)
    assert check(schedule) == []
    assert check_program(lower(schedule)) == []
    for rank, actions in enumerate(schedule.actions):
        stage = next(each for each in range(len(replicas)) if rank < sum(replicas[: each + 1]))
        turn = rank - sum(replicas[:stage])
        expected = [m for m in range(microbatches) if m % replicas[stage] == turn]
        for op in (Op.F, Op.B):
            found = [(action.stage, action.microbatch) for action in actions if action.op is op]
            assert found == [(stage, m) for m in expected]


@pytest.mark.parametrize("name", ["pipedream", "pipedream_vsync", "pipedream_2bw"])
@pytest.mark.parametrize(("replicas", "microbatches"), [((2, 1), 2), ((1, 2), 2), ((2, 1, 3), 6), ((2, 2), 4)])
def test_streams_repeat_and_steps_of_a_stage_are_made_together(
    name: str, replicas: tuple[int, ...], microbatches: int
) -> None:
    schedule = registry.build(name, ranks=sum(replicas), microbatches=microbatches, replicas=replicas)
    program = lower(schedule)
    assert check(schedule) == []
    assert check_program(program) == []
    assert {len(stream.body) for stream in streams_of(program)} == {1}
    summed: set[tuple[int, int, int]] = set()
    for _, action in program.order:
        if action.op is Op.REDUCE:
            summed.add((action.stage, action.window, action.row))
        if action.op is Op.STEP:
            copies = schedule.copies_of(action.stage)
            assert {(action.stage, action.window, row) for row in copies} <= summed


def test_replicas_that_fit_the_seconds_leave_no_more_idle_than_equal_stages() -> None:
    """A stage of twice the seconds on two ranks: each second of the steady state is one of the slow stage's."""
    replicas, microbatches = (2, 1), 40
    schedule = registry.build("1f1b", ranks=3, microbatches=microbatches, replicas=replicas)
    costs = StageCosts(F=(2.0, 1.0), B=(4.0, 2.0), I=(2.0, 1.0), W=(2.0, 1.0))
    assert simulate(schedule, costs).makespan <= 3.0 * microbatches + 2 * (2.0 + 4.0)


@pytest.mark.parametrize(
    ("name", "replicas", "ranks", "path", "fix"),
    [
        ("1f1b", [2, 1], 4, "schedule.replicas", "parallelism.pipeline=3"),
        ("gpipe", [5, 1], 6, "schedule.replicas", "schedule.microbatches=5"),
        ("1f1b", [0, 3], 3, "schedule.replicas", "schedule.replicas=[1,1,1]"),
        ("1f1b", [], 3, "schedule.replicas", "schedule.replicas=[1,1,1]"),
        ("zb_h1", [2, 1], 3, "schedule.replicas", "schedule.replicas=null"),
        ("pipedream", [3, 1], 4, "schedule.microbatches", "schedule.microbatches=6"),
        ("pipedream_2bw", [3, 2], 5, "schedule.microbatches", "schedule.microbatches=6"),
    ],
)
def test_what_is_refused(name: str, replicas: list[int], ranks: int, path: str, fix: str) -> None:
    (problem,) = registry.problems_of(name, ranks=ranks, microbatches=4, replicas=replicas)
    assert (problem.path, problem.fix) == (path, fix)
