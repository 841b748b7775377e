"""The plan of a run whose layers move: one plan for each cut, and the memory of all of them and of the moves."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_profiles import layer, model

from runner.config.schema import PartitionConfig, RunConfig
from runner.errors import RequestError
from runner.launch.run.prepare import place_of
from runner.plan.make import make_plan
from runner.plan.render import to_table
from runner.plan.values import RunPlan
from runner.profile import ModelProfile, SharedWeight

FROZEN = {"gradient_bytes": 0, "largest_parameter_bytes": 0}
CUTS = [[1, 4], [3, 6], [1, 3]]  # of the second stage, layers leave as others come


def request(first: list[int], migrate: dict[int, list[int]] | None = None) -> RunConfig:
    config = RunConfig(memory_limit="1GB")
    config.parallelism.pipeline, config.schedule.microbatches, config.data.batch_size = 3, 4, 4
    config.optimizer.name = "adamw"
    config.partition = PartitionConfig("manual", boundaries=first, migrate=migrate)
    return config


def moving(profile: ModelProfile) -> RunPlan:
    return make_plan(request(CUTS[0], {30: CUTS[2], 10: CUTS[1]}), profile)


PROFILES = {
    "trained": model([layer(weight_bytes=40 * n, gradient_bytes=40 * n, name=str(n)) for n in range(1, 8)]),
    # Weights without gradients and activations: a rank holds most while layers move.
    "frozen": model([layer(weight_bytes=1000 * n, name=str(n), **FROZEN) for n in range(1, 8)]),
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_peak_is_the_most_over_cuts_and_moves(name: str) -> None:
    profile = PROFILES[name]
    plan, alone = moving(profile), [make_plan(request(cut), profile) for cut in CUTS]
    assert [(step, each.partition) for step, each in plan.cuts] == [
        (step, each.partition) for step, each in zip((0, 10, 30), alone, strict=True)
    ]
    assert [each.peak_memory_bytes for _, each in plan.cuts] == [each.peak_memory_bytes for each in alone]
    for rank in range(3):
        peaks = [each.peak_memory_bytes[rank] for each in alone]
        for before, after in zip(alone, alone[1:], strict=False):
            (first, last), (then, to) = before.partition[rank], after.partition[rank]
            coming = [row for at, row in enumerate(profile.layers) if then <= at <= to and not first <= at <= last]
            states = before.memory.states[rank]
            weights = states.weights + sum(row.weight_bytes for row in coming)
            # AdamW: two states of the size of the gradient.
            peaks.append(weights + states.optimizer + 2 * sum(row.gradient_bytes for row in coming) + states.buffers)
        assert plan.peak_memory_bytes[rank] == max(peaks)
    if name == "frozen":
        assert plan.peak_memory_bytes[1] > max(each.peak_memory_bytes[1] for each in alone)
    assert plan.state_bytes == alone[-1].state_bytes


def test_the_plan_of_a_step_has_its_stages() -> None:
    plan = moving(PROFILES["trained"])
    firsts = {step: [first for first, _ in plan.at(step).partition[1:]] for step in (0, 9, 10, 29, 30, 99)}
    assert firsts == {0: CUTS[0], 9: CUTS[0], 10: CUTS[1], 29: CUTS[1], 30: CUTS[2], 99: CUTS[2]}
    assert plan.at(10).memory == plan.memory
    assert plan.at(10).at(30).partition == plan.at(30).partition


def test_the_plan_is_told_and_stored(tmp_path: Path) -> None:
    plan = moving(PROFILES["trained"])
    table = to_table(plan)
    rows = [line.split() for line in table[table.index("stages by step") :].splitlines()[3:6]]
    assert [row[:4] for row in rows] == [
        ["0", "0,", "1-3,", "4-6"], ["10", "0-2,", "3-5,", "6"], ["30", "0,", "1-2,", "3-6"],
    ]  # fmt: skip
    assert [each["after_step"] for each in plan.to_json()["cuts"]] == [0, 10, 30]
    assert place_of(plan)(1) == "stage 1, layers 1..3, after step 10 3..5, after step 30 1..2"
    plan.save(tmp_path)
    assert RunPlan.load(tmp_path) == plan


def test_a_weight_that_layers_share_stays() -> None:
    profile = model([layer(name=str(n)) for n in range(7)], shared=(SharedWeight((0, 4), 40, 40),))
    with pytest.raises(RequestError, match=r"must not move layer 4\. Layers 0, 4 share a weight"):
        moving(profile)
    kept = make_plan(request([2, 6], {10: [3, 6], 30: [1, 5]}), profile)
    assert len(kept.cuts) == 3
