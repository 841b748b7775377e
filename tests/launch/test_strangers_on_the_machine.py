"""Other users of the machine cannot join a local run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.launch.processes.meeting import TOKEN_VARIABLE
from runner.launch.slurm.script import batch_script

HERE = Path(__file__).parent


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
