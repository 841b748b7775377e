"""The predicted peak memory of every rank is within 10 % of the measured one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm
from covering import sampled
from user_project import environment, record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("model", sampled(["gpt", "mlp"], "gpt"))
def test_within_a_tenth(tmp_path: Path, model: str, pipeline: int) -> None:
    words = [
        f"model={model}", f"parallelism.pipeline={pipeline}", "trainer.max_steps=3", "data.batch_size=32",
        "schedule.microbatches=4", "logger=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *words]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    memory = record(tmp_path / "run")["peak_memory_bytes"]
    assert len(memory["measured"]) == pipeline
    assert memory["predicted"] == pytest.approx(memory["measured"], rel=0.1)


@pytest.mark.parametrize("schedule", sampled(["zb_v", "interleaved_1f1b", "varuna"], "zb_v"))
def test_chunks_and_split_backwards_within_a_twentieth(tmp_path: Path, schedule: str) -> None:
    words = [
        "model=gpt", f"schedule={schedule}", "parallelism.pipeline=2", "trainer.max_steps=3", "data.batch_size=32",
        "schedule.microbatches=8", "logger=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *words]
    done = warm.run(command, cwd=tmp_path, env=environment(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    memory = record(tmp_path / "run")["peak_memory_bytes"]
    assert memory["predicted"] == pytest.approx(memory["measured"], rel=0.05)
