"""Ranks that wait for one another: as long as a step may take, and in a save as long as a save may."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from resume_runs import record_of, train
from torch._C._distributed_c10d import HashStore

from runner.config.compose.resolve import resolve
from runner.launch.rank import process_group

TWO = ("parallelism.pipeline=2", "partition=uniform", "trainer.max_steps=2")


def test_messages_may_take_as_long_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which ranks must meet, 60 s, is no limit for a stage that computes longer."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    config = resolve(["model=mlp", "launcher.step_timeout_seconds=900"])
    with process_group(config, HashStore()):
        assert dist.group.WORLD is not None
        gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert gloo.options._timeout == timedelta(seconds=910)


@pytest.mark.full
def test_a_save_to_a_slow_disk_takes_longer_than_ranks_may_take_to_meet_and_than_a_step(tmp_path: Path) -> None:
    slow = ("model.target=slow_saves:model", "+model.kwargs.seconds=24")
    limits = ("launcher.rendezvous_timeout_seconds=12", "launcher.step_timeout_seconds=10")
    done = train(tmp_path / "run", *TWO, *slow, *limits, "launcher.watchdog_seconds=5")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-2.ckpt").exists()


@pytest.mark.full
@pytest.mark.slow
def test_a_save_that_takes_too_long_ends_the_run(tmp_path: Path) -> None:
    slow = ("model.target=slow_saves:model", "+model.kwargs.seconds=600")
    limits = ("checkpoint.timeout_seconds=6", "launcher.step_timeout_seconds=6", "launcher.watchdog_seconds=3")
    done = train(tmp_path / "run", *TWO, *slow, *limits)
    assert done.returncode == 1, done.stderr
    assert record_of(tmp_path / "run")["status"] == "failed"
    assert "no progress for" in record_of(tmp_path / "run")["reason"]
