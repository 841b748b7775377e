"""Whole runs whose activations are in the host's memory: weights, bytes and waits beside those of the plan."""

from __future__ import annotations

import pytest
from lightning_runs import fit, weights_of
from user_project import assert_same_weights, plain_result

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model
from runner.strategy.pipeline import EngineStrategy

SMALL = (
    "model=mlp", "model.kwargs.width=48", "model.kwargs.layers=6", "data.batch_size=16", "device=cpu",
    "partition=uniform",
)  # fmt: skip
OFFLOAD = "offload=activations_async"


def planned(*overrides: str) -> RunPlan:
    config = resolve([*SMALL, *overrides])
    return make_plan(config, profile_model(config))


@pytest.mark.costly
def test_a_plan_counts_what_leaves_the_device_as_not_there() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4", "data.batch_size=1024", "model.kwargs.layers=16")
    kept, moved = planned(*layout), planned(*layout, OFFLOAD)
    assert all(less < more for less, more in zip(moved.peak_memory_bytes, kept.peak_memory_bytes, strict=True))
    document = moved.to_json()
    each = sum(stage.moved_bytes for stage in moved.figures)
    assert document["bytes_moved"]["host_activations"] == 2 * 4 * each > 0
    assert kept.to_json()["bytes_moved"]["host_activations"] == 0
    assert any("host link's speed is not known" in line for line in moved.advice)
    assert any("this machine's memory, which no limit counts" in line for line in moved.advice)


@pytest.mark.costly
def test_a_slower_link_makes_a_step_longer_by_at_most_its_copies() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4", "hardware=laptop_cpu")  # seconds are estimated
    free = planned(*layout, OFFLOAD)
    steps = [free.time.step_seconds]
    # However slow the measured machine is: copies that take the step's own time, then ten and a hundred times as long.
    for times in (1, 10, 100):
        copies = times * free.time.step_seconds
        speed = 2 * free.host_activation_bytes / copies
        plan = planned(*layout, OFFLOAD, f"offload.bytes_per_second={speed}")
        assert plan.time.step_seconds <= free.time.step_seconds + copies + 1e-9
        assert times == 1 or max(plan.to_json()["offload_seconds"]) > 0
        steps.append(plan.time.step_seconds)
    assert steps == sorted(steps)
    assert any("computes wait up to" in line for line in plan.advice)


def test_weights_are_those_of_the_plain_loop_and_bytes_those_of_the_plan() -> None:
    overrides = ("offload.activations=async", "trainer.max_steps=4")
    trainer, _, _ = fit(*overrides)
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    assert strategy.engine is not None
    assert isinstance(strategy.plan, RunPlan)
    _, expected = plain_result()
    assert_same_weights(weights_of(trainer), expected)
    assert strategy.engine.bytes_sent["host_activations"] == 4 * 2 * strategy.plan.host_activation_bytes > 0
