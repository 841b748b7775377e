"""Parallel pipelines with weights of their own in real processes: equal to the plain loop, and planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from user_project import OVERRIDES, environment, make_directory, record, result, train

OPTIONS = ("schedule=avgpipe", "schedule.microbatches=4", "lr_scheduler=linear")
SGD = (*OPTIONS, "optimizer=sgd", "optimizer.momentum=0.9")
CASES = {
    "two stages": (*SGD, "parallelism.pipeline=2"),
    "one stage": (*OPTIONS, "optimizer=adamw", "schedule.pipes=4", "schedule.variant=updates"),
    "replicas": (*SGD, "parallelism.pipeline=2", "parallelism.data=2", "schedule.microbatches=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_verify_finds_it_equal_to_the_plain_loop(tmp_path: Path, case: str) -> None:
    directory = make_directory(tmp_path / "project")
    words = [sys.executable, "-m", "runner", "verify", *OVERRIDES[:-1], *CASES[case], "--json"]
    done = warm.run(words, cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["bitwise"]) == (True, True)


@pytest.mark.full
def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From a whole checkpoint, and from one in parts, in which the pipelines' weights are optimizer states."""
    directory = make_directory(tmp_path / "project")
    longer = (*CASES["two stages"], "trainer.max_steps=9", "checkpoint.every=4", "checkpoint.keep=9")
    whole, weights = result(directory, *longer, "trainer.val_every=2", run="whole")
    result(directory, *longer, "checkpoint.asynchronous=true", run="parts")
    for source in ("whole", "parts"):
        more = (f"resume={source}/checkpoints/step-4.ckpt",)
        resumed, again = result(directory, *longer, *more, run=f"from_{source}")
        assert resumed["loss"] == whole["loss"]
        assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [("optimizer=sgd", "optimizer.momentum=0.9"), ("optimizer=adamw",)])
def test_memory_is_predicted_with_all_pipelines(tmp_path: Path, optimizer: tuple[str, ...]) -> None:
    directory = make_directory(tmp_path / "project")
    more = ("parallelism.pipeline=2", "trainer.max_steps=6", "+model.kwargs.width=96", "partition=uniform")
    done = train(directory, *OPTIONS, *optimizer, *more)
    assert done.returncode == 0, done.stderr
    peaks, states = (record(directory / "run")[key] for key in ("peak_memory_bytes", "state_bytes"))
    for part in ("weights", "gradients", "optimizer"):
        assert [each[part] for each in states["predicted"]] == [each[part] for each in states["measured"]]
    for predicted, measured in zip(peaks["predicted"], peaks["measured"], strict=True):
        assert 0.99 * measured <= predicted <= 1.15 * measured
