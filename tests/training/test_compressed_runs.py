"""Compressed gradients in whole runs: what a plan predicts, what a record counts, checkpoints, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from user_project import assert_same_weights, environment, make_directory, result

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

LAYOUT = ("parallelism.data=2", "parallelism.pipeline=2", "schedule.microbatches=2")
SMALL = ("model=mlp", "model.kwargs.width=48", "model.kwargs.layers=4", "data.batch_size=16", "device=cpu")


def sent_by_plan(*overrides: str) -> float:
    config = resolve([*SMALL, *overrides])
    assert rules(config) == []
    made = make_plan(config, profile_model(config), device_memory_bytes=None)
    sent = made.to_json()["bytes_moved"]["weight_gradients"]
    assert isinstance(sent, float)
    return sent


def test_a_plan_predicts_what_is_sent_kept_and_how_long_it_takes() -> None:
    slow = (*SMALL, *LAYOUT, "hardware.link_bytes_per_second=1e6")
    configs = [resolve([*slow, *more]) for more in ((), ("compression=topk", "compression.density=0.05"))]
    plain, sparse = (make_plan(config, profile_model(config), device_memory_bytes=None) for config in configs)
    elements = plain.profile.num_parameters
    assert plain.gradient_bytes_sent == 2 * elements * 4  # each of two replicas sends all of its gradients
    assert sparse.gradient_bytes_sent == pytest.approx(2 * 8 * 0.05 * elements, rel=0.03)  # k is rounded up
    assert sparse.time.step_seconds < plain.time.step_seconds - 0.5 * 4 * elements / 2 / 1e6  # of the larger stage
    kept = [part.optimizer for part in sparse.memory.parts]
    assert sum(kept) == sum(part.optimizer for part in plain.memory.parts) + 4 * elements


def test_twins_and_one_replica_are_predicted_too() -> None:
    layout = ("parallelism.pipeline=2", "schedule.microbatches=4")
    assert sent_by_plan(*layout, "schedule=1f1b") == 0
    twins = sent_by_plan(*layout, "schedule=chimera")
    assert twins == 2 * 4 * make_plan(
        config := resolve([*SMALL]), profile_model(config), device_memory_bytes=None
    ).profile.num_parameters  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_sends_what_was_predicted_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    asked = (*LAYOUT, "compression=powersgd", "compression.rank=1", "checkpoint.every=2", "checkpoint.keep=5")
    found, whole = result(directory, *asked, run="whole")
    words = [sys.executable, "-m", "runner", "plan", "--json", *asked]
    mine = [
        "model.target=mine:model",
        "data.target=mine:points",
        "loss.target=mine:mean",
        "device=cpu",
        "data.batch_size=8",
    ]
    planned = warm.run([*words, *mine], cwd=directory, env=environment(directory))
    assert planned.returncode == 0, planned.stderr
    predicted = json.loads(planned.stdout)["bytes_moved"]["weight_gradients"]
    assert found["bytes_moved"]["weight_gradients"] == pytest.approx(predicted)
    (saved,) = (directory / "whole" / "checkpoints").glob("*2*")
    _, weights = result(directory, *asked, f"resume={saved}", run="resumed")
    assert_same_weights(weights, whole)
    _, plain = result(directory, *LAYOUT, run="plain")
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)
