"""Compressed gradients in whole runs: what a plan predicts, what a record counts, checkpoints, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import thread_runs
import torch
from user_project import assert_same_weights

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profiling.model import profile_model

LAYOUT = ("parallelism.data=2", "parallelism.pipeline=2", "schedule.microbatches=2")
SMALL = ("model=mlp", "model.kwargs.width=48", "model.kwargs.layers=4", "data.batch_size=16", "device=cpu")


def planned(*overrides: str) -> RunPlan:
    config = resolve([*SMALL, *overrides])
    return make_plan(config, profile_model(config))


@pytest.mark.costly
def test_a_plan_predicts_what_is_sent_kept_and_how_long_it_takes() -> None:
    slow = (*LAYOUT, "hardware=laptop_cpu", "hardware.link_bytes_per_second=1e6")
    plain, sparse = planned(*slow), planned(*slow, "compression=topk", "compression.density=0.05")
    elements = plain.profile.num_parameters
    assert plain.gradient_bytes_sent == 2 * elements * 4  # each of two replicas sends all of its gradients
    assert sparse.gradient_bytes_sent == pytest.approx(2 * 8 * 0.05 * elements, rel=0.03)  # k is rounded up
    assert sparse.time.step_seconds < plain.time.step_seconds - 0.5 * 4 * elements / 2 / 1e6  # of the larger stage
    kept, without = (sum(each["optimizer"] for each in plan.state_bytes) for plan in (sparse, plain))
    assert kept == without + 2 * 4 * elements  # both replicas keep what they have not sent
    assert max(sparse.peak_memory_bytes) > max(plain.peak_memory_bytes)


@pytest.mark.costly
def test_twins_and_one_replica_are_predicted_too() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4")
    assert planned(*layout, "schedule=1f1b").gradient_bytes_sent == 0
    twins = planned(*layout, "schedule=chimera")
    assert twins.to_json()["bytes_moved"]["weight_gradients"] == 2 * 4 * twins.profile.num_parameters


@pytest.mark.costly
def test_a_run_sends_what_was_predicted_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    asked = (*LAYOUT, "compression=powersgd", "compression.rank=1", "checkpoint.every=2", "checkpoint.keep=5")
    found, whole = thread_runs.result(tmp_path, *asked, run="whole")
    config = resolve([*thread_runs.WORDS, *asked])
    predicted = make_plan(config, profile_model(config)).to_json()["bytes_moved"]["weight_gradients"]
    assert found["bytes_moved"]["weight_gradients"] == pytest.approx(predicted)
    saved = tmp_path / "whole" / "checkpoints" / "step-2.ckpt"
    _, weights = thread_runs.result(tmp_path, *asked, f"resume={saved}", run="resumed")
    assert_same_weights(weights, whole)
    _, plain = thread_runs.result(tmp_path, *LAYOUT, run="plain")
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)
