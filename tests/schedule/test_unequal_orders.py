"""Orders of micro-batches that differ in size: what halves save, what ranks keep, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runner.schedule.catalogue import registry
from runner.schedule.checking.program import check_program
from runner.schedule.checking.schedule import check
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.batched import BatchedCosts, compiled
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.simulation.cores import span_on_cores


def of_halves(ranks: int, microbatches: int, halved: int) -> tuple[list[float], float]:
    """Shares of which the first are halves, and the mean size in units of a whole one."""
    shares = [1.0] * (2 * halved) + [2.0] * (microbatches - halved)
    return shares, microbatches / len(shares)


@pytest.mark.parametrize(("ranks", "microbatches", "halved"), [(2, 4, 1), (3, 6, 1), (4, 8, 1), (5, 10, 1), (8, 16, 2)])
def test_halves_save_half_of_the_start(ranks: int, microbatches: int, halved: int) -> None:
    """(D - 1) F / 2 of the step, and no rank keeps more than D - r whole micro-batches."""
    shares, mean = of_halves(ranks, microbatches, halved)
    schedule = registry.build("1f1b", ranks=ranks, microbatches=len(shares), shares=shares)
    costs = StageCosts(F=(mean,) * ranks, B=(2 * mean,) * ranks)
    found = simulate(schedule, Costs(F=1.0, B=2.0))
    assert simulate(schedule, costs).makespan == pytest.approx(found.makespan, rel=1e-12)
    assert found.makespan == pytest.approx(3 * (microbatches + ranks - 1) - (ranks - 1) / 2, rel=1e-12)
    assert list(found.peak_activations) == pytest.approx([ranks - rank for rank in range(ranks)], rel=1e-12)
    assert span_on_cores(schedule, costs, ranks) == pytest.approx(found.makespan, rel=1e-12)


def test_orders_of_any_sizes_can_run_and_keep_no_more_than_equal_ones() -> None:
    draw = random.Random(4)
    for _ in range(60):
        name, ranks, count = (
            draw.choice(["naive", "gpipe", "1f1b", "1f1b_eager"]),
            draw.randint(2, 5),
            draw.randint(1, 9),
        )
        shares = [draw.choice([1, 2, 0.3, 7.5]) for _ in range(count)]
        schedule = registry.build(name, ranks=ranks, microbatches=count, shares=shares)
        assert check(schedule) == []
        assert check_program(lower(schedule)) == []
        forward, backward = [draw.uniform(1, 2) for _ in range(ranks)], [draw.uniform(1, 3) for _ in range(ranks)]
        found = simulate(schedule, StageCosts(F=forward, B=backward))
        work = sum(schedule.size_of(m) for m in range(count))
        assert work == pytest.approx(count)
        assert sum(found.busy) == pytest.approx(sum(forward + backward) * count)
        if name == "1f1b":
            most = zip(found.peak_activations, range(ranks, 0, -1), strict=True)
            assert all(kept <= after + 1e-9 for kept, after in most)
        order = compiled(schedule)
        assert order is not None
        f, b = (np.array(each)[:, None] for each in (forward, backward))
        assert order.makespan(BatchedCosts(f, b, b, b, np.zeros((ranks - 1, 1))))[0] == found.makespan


def test_a_message_takes_its_size_on_the_link_and_its_latency_once() -> None:
    schedule = registry.build("gpipe", ranks=2, microbatches=2, shares=(1, 3))
    costs = StageCosts(F=(1.0, 1.0), B=(1.0, 1.0), comm=(0.5,), occupancy=(0.4,))
    program = lower(schedule)
    found = simulate(program, costs)
    took = {
        str(action): end - start
        for row, starts, ends in zip(program.actions, found.start, found.end, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
    }
    assert took["0SEND_F0>1"] == pytest.approx(0.1 + 0.2)
    assert took["0SEND_F1>1"] == pytest.approx(0.1 + 0.6)


@pytest.mark.parametrize(
    ("name", "shares", "replicas", "fix"),
    [
        ("1f1b", [1, 2], None, "schedule.microbatches=2"),
        ("gpipe", [1, 0, 1, 1], None, "schedule.shares=[1,1,1,1]"),
        ("naive", [1, 1, 1, float("inf")], None, "schedule.shares=[1,1,1,1]"),
        ("1f1b", [1, 1, 2, 2], [2, 1], "schedule.shares=null"),
        ("zb_h1", [1, 1, 2, 2], None, "schedule.shares=null"),
    ],
)
def test_what_is_refused(name: str, shares: list[float], replicas: list[int] | None, fix: str) -> None:
    ranks = sum(replicas or [1, 1, 1])
    (problem,) = registry.problems_of(name, ranks=ranks, microbatches=4, shares=shares, replicas=replicas)
    assert (problem.path, problem.fix) == ("schedule.shares", fix)
