"""Closed forms of flushed steps with unlike stages, as planners use them, against plays of the orders."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from runner.schedule.catalogue.registry import SPECS, build
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.batched import BatchedCosts, Numbers, compiled
from runner.schedule.values import Op, Schedule

DRAWS = 1000
SIZES = pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 6), (4, 4), (4, 8), (4, 16)])


def one_directional(ranks: int, microbatches: int) -> list[Schedule]:
    """Every flushed order in which all micro-batches take the same way, forth and back."""
    found = []
    for spec in SPECS.values():
        if spec.kind != "synchronous" or spec.by_plan or spec.default_chunks is None:
            continue
        request = ScheduleRequest(ranks, microbatches, spec.default_chunks)
        made = fuse_backwards(spec.generate(request)) if spec.accepts(request) else None
        if made is not None and len(made.rows) == 1 and compiled(made) is not None:
            found.append(made)
    return found


def drawn(schedule: Schedule, *, messages: bool) -> BatchedCosts:
    """Random seconds; a whole backward takes as long as its parts, and a message between stages of one rank nothing."""
    draw, (row,) = np.random.default_rng(schedule.microbatches), schedule.rows
    forward, of_input, of_weights = (draw.uniform(0.2, 1.8, (schedule.stages, DRAWS)) for _ in range(3))
    message = draw.uniform(0.0, 0.5, (schedule.stages - 1, DRAWS)) * messages
    message[[at for at in range(schedule.stages - 1) if row[at] == row[at + 1]]] = 0.0
    return BatchedCosts(forward, of_input + of_weights, of_input, of_weights, message)


def before(rows: Numbers) -> Numbers:
    """For each stage the sum of the rows of the stages before it."""
    return np.array(list(accumulate(rows, initial=np.zeros(DRAWS))))


def seconds_of(schedule: Schedule, costs: BatchedCosts) -> Numbers:
    order = compiled(schedule)
    assert order is not None
    return order.makespan(costs)


@SIZES
@pytest.mark.parametrize("messages", [False, True])
def test_no_order_in_one_direction_is_shorter_than_its_bound(ranks: int, microbatches: int, messages: bool) -> None:
    """A stage begins when the stages before it have run a forward, and ends before they have run a backward.

    Between both it runs all of its micro-batches. So no step is shorter than the largest sum(w_a for a < s) + T w_s, if
    backwards are whole. If they are in two parts, a stage can run second parts while the last gradient is on its way
    through the stages before it, and that bound does not hold. Two others do: those forwards and all that the stage
    runs; and those forwards and first parts, the stage's own of all micro-batches, and one second part of the first
    stage, which nothing can run before the last gradient has arrived there.
    """
    whole = undercut = 0
    for schedule in one_directional(ranks, microbatches):
        costs, count = drawn(schedule, messages=messages), schedule.microbatches
        ends, sent, work = seconds_of(schedule, costs), before(costs.message), costs.forward + costs.backward
        bound = (before(work)[:-1] + 2 * sent + count * work).max(axis=0)
        if any(action.op is Op.I for row in schedule.actions for action in row):
            undercut += int((ends < bound * (1 - 1e-9)).sum())
            first = costs.forward + costs.input_gradient
            way = before(first)[:-1] + 2 * sent + count * first
            way[1:] += costs.weight_gradient[0]
            bound = np.maximum(before(costs.forward)[:-1] + sent + count * work, way).max(axis=0)
        else:
            whole += 1
        assert (ends >= bound * (1 - 1e-12)).all(), schedule.name
    assert whole >= 6
    assert undercut > 0


@SIZES
def test_1f1b_is_no_longer_than_its_stages_and_the_slowest_for_each_further_microbatch(
    ranks: int, microbatches: int
) -> None:
    """Without messages; and as long where all stages are alike, or the slowest is the last."""
    schedule = build("1f1b", ranks, microbatches)
    costs = drawn(schedule, messages=False)
    work = costs.forward + costs.backward
    whole = work.sum(axis=0) + (microbatches - 1) * work.max(axis=0)
    ends = seconds_of(schedule, costs)
    assert (ends <= whole * (1 + 1e-12)).all()
    last = work.argmax(axis=0) == ranks - 1
    assert last.any()
    np.testing.assert_allclose(ends[last], whole[last], rtol=1e-12)


@SIZES
def test_gpipe_has_its_closed_form(ranks: int, microbatches: int) -> None:
    schedule = build("gpipe", ranks, microbatches)
    costs = drawn(schedule, messages=True)
    parts = (each.sum(axis=0) + (microbatches - 1) * each.max(axis=0) for each in (costs.forward, costs.backward))
    closed = sum(parts) + 2 * costs.message.sum(axis=0)
    np.testing.assert_allclose(seconds_of(schedule, costs), closed, rtol=1e-12)
