"""`runner verify` finds ZeRO, delayed updates and post-validation equal to one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm
from user_project import environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("zero.stage=3", "parallelism.data=2"), id="stage3"),
        pytest.param(
            ("zero.stage=1", "parallelism.data=2", "offload.optimizer=cpu", "offload.delay_from=2"),
            id="delayed",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("parallelism.pipeline=2", "schedule=zb_v", "schedule.post_validation=true", "trainer.grad_clip_norm=0.5"),
            id="post_validation",
            marks=pytest.mark.full,
        ),
    ],
)
def test_it_equals_one_process(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    words = ["model=mlp", "data.batch_size=8", "schedule.microbatches=4", "device=cpu", "--json", *overrides]
    command = [sys.executable, "-m", "runner", "verify", *words]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path), timeout=200, kind=warm.WarmZero)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"] is True
