"""An asynchronous schedule in real processes: equal to its recurrence, planned, and continued bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from user_project import OVERRIDES, environment, make_directory, record, result, train

ASYNCHRONOUS = ("parallelism.pipeline=2", "schedule=pipedream_2bw", "schedule.microbatches=4", "optimizer=sgd",
                "optimizer.momentum=0.9", "lr_scheduler=linear")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_verify_finds_it_equal_to_the_delayed_loop(tmp_path: Path, ranks: int) -> None:
    directory = make_directory(tmp_path / "project")
    layout = f"parallelism.pipeline={ranks}"
    words = [sys.executable, "-m", "runner", "verify", *OVERRIDES[:-1], *ASYNCHRONOUS, layout, "--json"]
    done = warm.run(words, cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["bitwise"]) == (True, True)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_whatever_was_drained(tmp_path: Path) -> None:
    """Validations and checkpoints, whole and in parts, drain the pipeline: no bit of the losses and weights moves."""
    directory = make_directory(tmp_path / "project")
    longer = (*ASYNCHRONOUS, "trainer.max_steps=9")
    losses, weights = result(directory, *longer, run="whole")
    drained, other = result(
        directory, *longer, "trainer.val_every=2", "checkpoint.every=4", "checkpoint.keep=9", run="drained"
    )
    assert drained["loss"] == losses["loss"]
    assert losses["steps"] == len(losses["loss"]) == 9
    for name, value in weights.items():
        assert torch.equal(other[name], value)
    for more in ((), ("checkpoint.asynchronous=true",)):
        run = f"resumed{len(more)}"
        source = "drained" if not more else "parts"
        if more:
            result(directory, *longer, "checkpoint.every=4", "checkpoint.keep=9", *more, run=source)
        resumed, again = result(directory, *longer, f"resume={source}/checkpoints/step-4.ckpt", run=run)
        assert resumed["loss"] == losses["loss"]
        assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []


@pytest.mark.slow
def test_memory_is_predicted_with_both_versions(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, *ASYNCHRONOUS, "trainer.max_steps=8")
    assert done.returncode == 0, done.stderr
    peaks = record(directory / "run")["peak_memory_bytes"]
    for predicted, measured in zip(peaks["predicted"], peaks["measured"], strict=True):
        assert predicted == pytest.approx(measured, rel=0.05)
