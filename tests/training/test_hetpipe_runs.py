"""Workers that exchange waves, in real processes: equal to the plain loop, planned, refused and continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from user_project import OVERRIDES, environment, make_directory, record, result, train

SGD = ("optimizer=sgd", "lr_scheduler=linear")
WORKERS = ("parallelism.data=2", "schedule=hetpipe", "schedule.microbatches=1", *SGD)


def verified(directory: Path, *asked: str) -> tuple[int, str, str]:
    words = [sys.executable, "-m", "runner", "verify", *OVERRIDES[:-1], *asked, "--json"]
    done = warm.run(words, cwd=directory, env=environment(directory))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_verify_compares_one_worker_and_refuses_several(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    asked = ("parallelism.pipeline=2", "schedule=hetpipe", "schedule.microbatches=1", *SGD)
    status, told, errors = verified(directory, *asked)
    assert status == 0, errors
    found = json.loads(told)
    assert (found["equal"], found["bitwise"]) == (True, True)
    status, _, errors = verified(directory, *asked, "parallelism.data=2")
    assert status == 2
    assert "parallelism.data = 2: must be 1. The plain loop has the weights of one worker." in errors


@pytest.mark.slow
def test_a_synchronous_parameter_server_is_data_parallelism(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    _, served = result(directory, "parallelism=parameter_server", "schedule.wave=1", *SGD, run="served")
    _, summed = result(directory, "parallelism=data", *SGD, run="summed")
    config = record(directory / "served")["config"]
    assert config["schedule"]["name"] == "hetpipe"
    for name, value in summed.items():
        torch.testing.assert_close(served[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_memory_is_predicted_and_a_run_without_momentum_goes_on(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "project")
    wide = ("+model.kwargs.width=96", "partition=uniform", "parallelism.pipeline=2", "schedule.distance=1")
    longer = (*WORKERS, *wide, "trainer.max_steps=9", "checkpoint.every=4", "checkpoint.keep=9")
    whole, weights = result(directory, *longer, run="whole")
    resumed, again = result(directory, *longer, "resume=whole/checkpoints/step-4.ckpt", run="resumed")
    assert resumed["loss"] == whole["loss"]
    assert [name for name, value in weights.items() if not torch.equal(again[name], value)] == []
    for predicted, measured in zip(
        *(whole["peak_memory_bytes"][key] for key in ("predicted", "measured")), strict=True
    ):
        assert measured <= predicted <= 1.3 * measured


@pytest.mark.slow
def test_a_worker_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path / "project"), *WORKERS, "precision=bf16_master")
    assert done.returncode == 2
    assert "must keep weights in fp32 with schedule=hetpipe" in done.stderr
