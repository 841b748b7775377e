"""A GPT with tensor-train embeddings: stages give what one process gives, and an export has tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm
from safetensors.torch import load_file
from user_project import environment, record

pytestmark = pytest.mark.full
SMALL = ("model=gpt", "embedding=tensor_train", "trainer.max_steps=2", "data.batch_size=8", "logger=none", "device=cpu")


def _runner(directory: Path, *words: str) -> str:
    done = warm.run([sys.executable, "-m", "runner", *words], cwd=directory, env=environment(directory), timeout=200)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_stages_are_one_process_bit_for_bit_and_the_export_has_tables(tmp_path: Path) -> None:
    cut = ("parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=2")
    _runner(tmp_path, "train", *SMALL, *cut, "run_dir=two")
    _runner(tmp_path, "train", *SMALL, "schedule.microbatches=2", "run_dir=one")
    assert record(tmp_path / "one")["loss"] == record(tmp_path / "two")["loss"]
    memory = record(tmp_path / "two")["peak_memory_bytes"]
    for predicted, measured in zip(memory["predicted"], memory["measured"], strict=True):
        assert 0.99 * predicted <= measured <= predicted
    _runner(tmp_path, "export", "two", "dense.safetensors")
    weights = load_file(tmp_path / "dense.safetensors")
    assert tuple(weights["0.tokens.weight"].shape) == (512, 128)
    assert not [name for name in weights if "cores" in name]
    assert "val_loss" in _runner(tmp_path, "evaluate", "two")
