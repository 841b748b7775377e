"""`runner verify` finds ZeRO equal to one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm
from user_project import environment


@pytest.mark.costly
def test_it_equals_one_process(tmp_path: Path) -> None:
    words = ["model=mlp", "data.batch_size=8", "schedule.microbatches=4", "device=cpu", "--json"]
    command = [sys.executable, "-m", "runner", "verify", *words, "zero.stage=3", "parallelism.data=2"]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path), timeout=1500, kind=warm.WarmZero)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"] is True
