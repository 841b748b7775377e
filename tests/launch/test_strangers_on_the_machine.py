"""Other users of the machine cannot join a local run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from launch_helpers import OVERRIDES

from runner.config.compose.resolve import resolve
from runner.launch.local.meeting import TOKEN_VARIABLE
from runner.launch.run.start import train
from runner.launch.slurm.script import batch_script

HERE = Path(__file__).parent


def test_ranks_listen_at_the_loopback_and_meet_under_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    config = resolve([*OVERRIDES, "parallelism.pipeline=2", "run_dir=run"])
    assert train(config, command="a test", entry="listening_entries:tell") == 0
    told = json.loads(Path("run/told.json").read_text())
    assert told["sockets"] > 0
    assert told["elsewhere"] == []
    assert told["seen_by_a_stranger"] is False
    assert len(told["token"]) == 32
    assert all(told["token"] not in path.read_text(errors="replace") for path in Path("run").rglob("*.y*ml"))


def test_two_runs_have_different_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.launch.local.ranks import _Shared

    first, second = _Shared(1), _Shared(1)
    assert first.token != second.token
    first.close()
    second.close()


def test_a_batch_job_makes_its_secret_when_it_starts(tmp_path: Path) -> None:
    script = batch_script(resolve(["model=mlp", "launcher=slurm"]), tmp_path, ["true"], working_directory=tmp_path)
    (line,) = [line for line in script.splitlines() if TOKEN_VARIABLE in line]
    shown = os.popen(f'{line}; printf %s "${TOKEN_VARIABLE}"').read()
    assert len(shown) == 32
    assert int(shown, 16)


def test_dist_is_not_initialised_by_a_test_of_this_file() -> None:
    assert not dist.is_initialized()
