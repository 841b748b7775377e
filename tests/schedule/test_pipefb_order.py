"""Forwards and backwards of a stage on different ranks: placement, messages, memory, time and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_profiles import layer, model

from runner.plan.memory.held import Held, held_microbatches
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import in_flight_microbatches, predict_memory
from runner.plan.requested_schedule import resolve_request
from runner.plan.rules.tables import order_problems
from runner.plan.stages.figures import stage_figures
from runner.schedule import Costs, Op, build, check, check_program, lower, problems_of, simulate
from runner.schedule.catalogue.registry import SEARCHED
from runner.schedule.render import to_json, to_text
from runner.schedule.stream import versions_held
from runner.schedule.values import Payload

GRID = """
r0f0 |012         34567               ......
r0f1 |   0aa1bb2cc     3dd4ee5ff6gg7hh......
r1f  |.012 .        34567               ....
r1b  |.   ~.aa~bb~cc     ~dd~ee~ff~gg~hh....
r2f  |..012 ..        34567               ..
r2b  |..   ~..aa~bb~cc     ~dd~ee~ff~gg~hh..
r3b  |~.........aa~bb~cc~.....dd~ee~ff~gg~hh
"""


def test_the_grid() -> None:
    schedule = build("pipefb", ranks=4, microbatches=8)
    assert to_text(schedule, Costs()).startswith(GRID.strip() + "\n")
    assert versions_held(schedule) == (2, 2, 2, 1)
    assert simulate(schedule, Costs()).peak_activations == (1, 1, 1, 1)
    document = to_json(schedule, Costs())
    assert document["placement"] == [[0, 1, 2, 0]]
    assert document["backward_placement"] == [3, 2, 1, 0]
    assert json.loads(json.dumps(document))["bubble_ratio"] == pytest.approx(1 - 32 * 3.75 / (38 * 4))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 13), (4, 2), (5, 6), (7, 6)])
def test_every_size_is_valid_and_moves_every_backward_but_the_last_stages(ranks: int, microbatches: int) -> None:
    schedule = build("pipefb", ranks=ranks, microbatches=microbatches)
    assert check(schedule) == []
    assert check_program(lower(schedule)) == []
    assert schedule.sums_in_order
    for stage in range(ranks):
        middle = stage == ranks - 1 - stage
        assert schedule.has_other_backward(stage) == (stage < ranks - 1 and not middle)
        for microbatch in range(microbatches):
            assert schedule.is_recomputed(stage, microbatch) == (stage < ranks - 1)
            assert schedule.rank_of(stage, microbatch) == stage % (ranks - 1)
            assert schedule.rank_of(stage, microbatch, Op.B) == ranks - 1 - stage
    played = simulate(schedule, Costs())
    assert played.makespan <= 4 * microbatches + 4 * (ranks - 1) + microbatches


def test_a_stage_sends_its_output_to_both_ranks_of_the_next() -> None:
    program = lower(build("pipefb", ranks=4, microbatches=1))
    sends = [str(action) for row in program.actions for action in row if action.op is Op.SEND]
    assert sends == [
        "0SEND_F0>1", "0SEND_R0>2", "3SEND_B0>1", "1SEND_F0>2", "2SEND_B0>2", "2SEND_F0>0", "1SEND_B0>3",
    ]  # fmt: skip
    inputs = [action for row in program.actions for action in row if action.payload is Payload.INPUT]
    assert [str(action) for action in inputs] == ["0SEND_R0>2", "1RECV_R0<0"]


def test_a_missing_recomputation_or_input_is_found() -> None:
    from dataclasses import replace

    schedule = build("pipefb", ranks=3, microbatches=2)
    rows = tuple(tuple(a for a in row if str(a) != "0R1") for row in schedule.actions)
    assert any("no recomputation (0R1)" in defect for defect in check(replace(schedule, actions=rows)))
    four = lower(build("pipefb", ranks=4, microbatches=2))
    rows = tuple(tuple(a for a in row if str(a) != "1RECV_R1<0") for row in four.actions)
    assert "rank 2: 1RECV_R1<0 is missing" in check_program(replace(four, actions=rows))


def test_what_is_planned_of_memory() -> None:
    """Weights of both stages; of activations one micro-batch's, and inputs, however many micro-batches there are."""
    profile = model([layer() for _ in range(4)])
    figures = stage_figures(profile, [(s, s) for s in range(4)])

    def parts(microbatches: int) -> Any:
        program = lower(build("pipefb", ranks=4, microbatches=microbatches))
        return predict_memory(program, profile, figures, MemoryNeeds(1)).parts

    assert in_flight_microbatches(build("pipefb", ranks=4, microbatches=12)) == (1, 1, 1, 1)
    assert held_microbatches(build("pipefb", ranks=4, microbatches=12)) == ((Held(1, 0, 0),),) * 4
    assert [part.weights for part in parts(4)] == [80, 80, 80, 40]
    most = max(figures[0].saved_bytes + max(figures[0].forward_peak_bytes, figures[0].backward_peak_bytes), 52)
    assert all(part.activations <= most for part in parts(12))
    gpipe = predict_memory(lower(build("gpipe", ranks=4, microbatches=12)), profile, figures, MemoryNeeds(1)).parts
    assert all(few.activations < many.activations for few, many in zip(parts(12), gpipe, strict=True))


def test_refusals() -> None:
    (problem,) = problems_of("pipefb", ranks=1, microbatches=2)
    assert problem.line().startswith("parallelism.pipeline = 1: must be at least 2 for schedule=pipefb.")
    (problem,) = problems_of("pipefb", ranks=2, microbatches=2, chunks=2)
    assert problem.path == "schedule.chunks"
    words = ["schedule=pipefb", "parallelism.pipeline=2", "schedule.microbatches=2", "schedule.post_validation=true"]
    (problem,) = order_problems(resolve_request(words), build("pipefb", ranks=2, microbatches=2), 2)
    assert problem.line() == (
        "schedule.post_validation = true: must be false. Several ranks of pipefb hold a stage, and its copies would "
        "have to be taken back together. Try schedule.post_validation=false."
    )
    assert "pipefb" not in {spec.name for spec in SEARCHED}
