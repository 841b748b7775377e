"""Asynchronous schedules by ``runner verify``: equal to their recurrences; what workers cannot do is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import thread_runs
import torch
import warm
from user_project import OVERRIDES, environment, make_directory

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


def test_a_resumed_run_is_the_one_that_went_on(tmp_path: Path) -> None:
    """Both drain the pipeline at the checkpoint; the pipelines' own weights are optimizer states."""
    longer = (*layout("avgpipe", 2, 4, *SGD), "trainer.max_steps=4", "checkpoint.every=2", "checkpoint.keep=9")
    whole, weights = thread_runs.result(tmp_path, *longer, run="whole")
    saved = tmp_path / "whole" / "checkpoints" / "step-2.ckpt"
    resumed, again = thread_runs.result(tmp_path, *longer, f"resume={saved}", run="resumed")
    assert resumed["loss"] == whole["loss"]
    assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []


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
