"""Predicted weights and PipeMare in real processes: equal to the plain loop, planned, continued bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from covering import sampled
from user_project import OVERRIDES, environment, make_directory, record, result, train

SGD = ("optimizer=sgd", "optimizer.momentum=0.9", "lr_scheduler=linear")
ADAM = ("optimizer=adamw", "optimizer.weight_decay=0.1", "lr_scheduler=linear")
PIPEMARE = ("schedule.lr_rescheduling=3", "schedule.warmup_steps=1", "optimizer=sgd", "lr_scheduler=linear")


def layout(schedule: str, ranks: int, microbatches: int, *more: str) -> tuple[str, ...]:
    shape = (f"parallelism.pipeline={ranks}", f"schedule.microbatches={microbatches}")
    return (f"schedule={schedule}", *shape, *more)


VERIFIED = [
    layout("spectrain", 4, 1, *SGD),
    layout("xpipe", 4, 4, *ADAM),
    layout("pipemare", 3, 1, *PIPEMARE),
    layout("pipedream", 3, 2, *ADAM, "weight_prediction=nesterov"),
    layout("ampnet", 2, 1, "optimizer=rmsprop", "weight_prediction=xgrad"),
    layout("1f1b", 2, 4, *ADAM, "weight_prediction=xgrad"),
    layout("gpipe", 1, 2, *SGD, "weight_prediction=momentum", "weight_prediction.gap=2", "precision=bf16_master"),
]


@pytest.mark.slow
@pytest.mark.parametrize("asked", sampled(VERIFIED, *VERIFIED[::3]), ids=" ".join)
def test_verify_finds_it_equal_to_the_plain_loop(tmp_path: Path, asked: tuple[str, ...]) -> None:
    directory = make_directory(tmp_path / "project")
    words = [sys.executable, "-m", "runner", "verify", *OVERRIDES[:-1], *asked, "--json", "--steps", "6"]
    done = warm.run(words, cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["bitwise"]) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        layout("spectrain", 3, 1, *SGD),
        layout("pipemare", 3, 1, *PIPEMARE),
        layout("ampnet", 2, 1, "optimizer=rmsprop", "weight_prediction=xgrad"),
    ],
    ids=lambda asked: asked[0],
)
def test_a_resumed_run_is_the_one_that_went_on(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Both drain the pipeline at the checkpoint, and fill it again with the newest weights and states."""
    directory = make_directory(tmp_path / "project")
    longer = (*asked, "trainer.max_steps=9", "checkpoint.every=4", "checkpoint.keep=9")
    whole, weights = result(directory, *longer, run="whole")
    resumed, again = result(directory, *longer, "resume=whole/checkpoints/step-4.ckpt", run="resumed")
    assert resumed["loss"] == whole["loss"]
    assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        layout("spectrain", 3, 1, *SGD),
        layout("xpipe", 2, 4, *ADAM),
        layout("pipemare", 3, 1, *PIPEMARE),
        layout("pipedream", 3, 1, *ADAM, "weight_prediction=adam"),
    ],
    ids=lambda asked: asked[0],
)
def test_memory_is_predicted_with_all_copies(tmp_path: Path, asked: tuple[str, ...]) -> None:
    directory = make_directory(tmp_path / "project")
    done = train(directory, *asked, "trainer.max_steps=10", "+model.kwargs.width=96", "partition=uniform")
    assert done.returncode == 0, done.stderr
    states = record(directory / "run")["state_bytes"]
    for part in ("weights", "optimizer"):
        assert [each[part] for each in states["predicted"]] == [each[part] for each in states["measured"]]
    peaks = record(directory / "run")["peak_memory_bytes"]
    for predicted, measured in zip(peaks["predicted"], peaks["measured"], strict=True):
        assert 0.99 * measured <= predicted <= 1.15 * measured + 4096  # a stage has 20 to 200 kB here
