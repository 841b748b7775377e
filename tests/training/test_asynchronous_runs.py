"""Asynchronous schedules in real processes: equal to their recurrences, and continued bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import thread_runs
import torch
import warm
from user_project import OVERRIDES, environment, make_directory, record, result

SGD = ("optimizer=sgd", "optimizer.momentum=0.9", "lr_scheduler=linear")
PIPEMARE = ("schedule.lr_rescheduling=3", "schedule.warmup_steps=1", "optimizer=sgd", "lr_scheduler=linear")


def layout(schedule: str, ranks: int, microbatches: int, *more: str) -> tuple[str, ...]:
    shape = (f"parallelism.pipeline={ranks}", f"schedule.microbatches={microbatches}")
    return (f"schedule={schedule}", *shape, *more)


VERIFIED = [
    layout("pipedream_2bw", 2, 4, *SGD),
    layout("avgpipe", 1, 4, "schedule.pipes=4", "schedule.variant=updates"),
    layout("pipemare", 3, 1, *PIPEMARE),
    layout("hetpipe", 2, 1, "optimizer=sgd", "lr_scheduler=linear"),
    layout("ampnet", 2, 1, "optimizer=rmsprop", "weight_prediction=xgrad"),
]


@pytest.mark.costly
@pytest.mark.parametrize("asked", VERIFIED, ids=lambda asked: asked[0])
def test_verify_finds_it_equal_to_the_plain_loop(tmp_path: Path, asked: tuple[str, ...]) -> None:
    directory = make_directory(tmp_path / "project")
    words = [sys.executable, "-m", "runner", "verify", *OVERRIDES[:-1], *asked, "--json"]
    done = warm.run(words, cwd=directory, env=environment(directory))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["bitwise"]) == (True, True)


@pytest.mark.costly
def test_a_run_goes_on_bit_for_bit_whatever_was_drained(tmp_path: Path) -> None:
    """Validations and checkpoints in parts drain the pipeline: no bit of the losses and weights moves."""
    directory = make_directory(tmp_path / "project")
    longer = (*layout("pipedream_2bw", 2, 4, *SGD), "trainer.max_steps=9")
    losses, weights = result(directory, *longer, run="whole")
    saved = ("trainer.val_every=2", "checkpoint.every=4", "checkpoint.keep=9", "checkpoint.asynchronous=true")
    drained, other = result(directory, *longer, *saved, run="drained")
    resumed, again = result(directory, *longer, "resume=drained/checkpoints/step-4.ckpt", run="resumed")
    assert drained["loss"] == resumed["loss"] == losses["loss"]
    assert losses["steps"] == len(losses["loss"]) == 9
    for name, value in weights.items():
        assert torch.equal(other[name], value)
        assert torch.equal(again[name], value)


@pytest.mark.costly
@pytest.mark.parametrize(
    "asked", [layout("avgpipe", 2, 4, *SGD), layout("pipemare", 3, 1, *PIPEMARE)], ids=lambda asked: asked[0]
)
def test_a_resumed_run_is_the_one_that_went_on(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Both drain the pipeline at the checkpoint; the pipelines' own weights are optimizer states."""
    longer = (*asked, "trainer.max_steps=6", "checkpoint.every=3", "checkpoint.keep=9")
    whole, weights = thread_runs.result(tmp_path, *longer, run="whole")
    saved = tmp_path / "whole" / "checkpoints" / "step-3.ckpt"
    resumed, again = thread_runs.result(tmp_path, *longer, f"resume={saved}", run="resumed")
    assert resumed["loss"] == whole["loss"]
    assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []


@pytest.mark.costly
def test_a_synchronous_parameter_server_is_data_parallelism(tmp_path: Path) -> None:
    sgd = ("optimizer=sgd", "lr_scheduler=linear")
    _, served = thread_runs.result(tmp_path, "parallelism=parameter_server", "schedule.wave=1", *sgd, run="served")
    _, summed = thread_runs.result(tmp_path, "parallelism=data", *sgd, run="summed")
    assert record(tmp_path / "served")["config"]["schedule"]["name"] == "hetpipe"
    for name, value in summed.items():
        torch.testing.assert_close(served[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "more", "line"),
    [
        ("verify", (), "parallelism.data = 2: must be 1. The plain loop has the weights of one worker."),
        ("train", ("precision=bf16_master",), "must keep weights in fp32 with schedule=hetpipe"),
    ],
)
def test_what_workers_cannot_do_is_refused(command: str, more: tuple[str, ...], line: str) -> None:
    workers = (*layout("hetpipe", 2, 1, "optimizer=sgd"), "parallelism.data=2", *more)
    status, told = thread_runs.told(command, *thread_runs.WORDS, *workers)
    assert status == 2
    assert line in told
