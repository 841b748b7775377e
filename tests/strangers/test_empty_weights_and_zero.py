"""A trainable weight without elements under DeepSpeed's ZeRO: trained and saved as in plain PyTorch, or refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import odd_layers
import pytest
import torch
from odd_runs import BATCH, RATE, STEPS, in_plain_pytorch, profile_of, words_of
from safetensors.torch import load_file

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.plan.make import make_plan

KINDS = ["empty weight", "complex buffer", "empty weight"]


@pytest.mark.costly
def test_zero_trains_beside_an_empty_weight_and_saves_it(tmp_path: Path) -> None:
    shutil.copy(odd_layers.__file__, tmp_path)
    words = [
        *words_of(KINDS, "optimizer=adamw", f"optimizer.lr={RATE}", "optimizer.weight_decay=0.01"),
        "lr_scheduler=constant", f"trainer.max_steps={STEPS}", "parallelism.data=2", "zero.stage=2",
        "logger=none", "run_dir=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "runner", "train", *words]
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": root, "RUNNER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = in_plain_pytorch(KINDS, "adamw")
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    torch.testing.assert_close(record["loss"], expected.losses, rtol=2e-6, atol=0.0)
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert weights["1.weight"].shape == weights["3.weight"].shape == (0, odd_layers.WIDTH)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected.tensors[name], rtol=2e-4, atol=2e-6)


def test_the_stage_that_cannot_gather_nothing_is_refused() -> None:
    words = words_of(KINDS, "parallelism.data=2", "zero.stage=3", f"data.batch_size={BATCH}")
    with pytest.raises(RequestError) as refused:
        make_plan(resolve(words), profile_of(KINDS, BATCH // 2))
    (problem,) = refused.value.problems
    assert problem.line() == (
        "zero.stage = 3: must be at most 2 with a weight without elements, 1.weight. A weight that is shared out into "
        "nothing is never complete, and its forward waits for that. Try zero.stage=2."
    )
