"""What a step takes before and after the engine's work is predicted, too."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch.utils.data import Dataset
from user_project import environment, record

from runner.config.compose.resolve import resolve
from runner.training.data.loading import make_loader, timed_first_batch
from runner.training.measure.loop import remember_loop, usual_loop_seconds

SECONDS = 0.02
SLOW = """
import time
import torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        time.sleep(0.02)
        return torch.full((32,), float(number)), torch.zeros(8)

def slow():
    return Slow()
"""


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SECONDS)
        return torch.full((32,), float(number)), torch.zeros(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_waited_for_is_timed(workers: int) -> None:
    """It is the second one; the samples of the first one may be slow once."""
    options: dict[str, Any] = {"data": 1, "replica": 0, "inputs": True, "targets": True, "shuffle": False, "seed": 5}
    loader = make_loader(Slow(), 8, batch_size=4, workers=workers, **options)
    batch, seconds = timed_first_batch(loader)
    assert batch.samples == 4
    assert seconds == 0 if workers else seconds >= 4 * SECONDS


def test_the_loop_is_remembered_by_what_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    plain = resolve(["model=mlp", "logger=none"])
    before = usual_loop_seconds(plain)
    remember_loop(plain, [9.0] * 4)  # too few steps to tell
    assert usual_loop_seconds(plain) == before
    for seconds in (9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        remember_loop(plain, [seconds] * 3 + [99.0] * 2)
    assert usual_loop_seconds(plain) == 3.0  # of the last five runs
    for words in (["logger=csv"], ["logger=none", "trainer.ema_decay=0.9"], ["logger=none", "model.target=mine:model"]):
        assert usual_loop_seconds(resolve(["model=mlp", *words])) == before, words
    for path in tmp_path.rglob("*.json"):
        path.write_text("[]")
    assert usual_loop_seconds(plain) == before


def test_a_run_predicts_the_wait_for_its_batches(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW, encoding="utf-8")
    words = [
        "model=mlp",
        "data.target=own:slow",
        "data.batch_size=4",
        "trainer.max_steps=7",
        "logger=none",
        "run_dir=run",
    ]
    done = warm.run([sys.executable, "-m", "runner", "train", *words], cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "run")["step_seconds"]["predicted"] >= 4 * SECONDS
    assert list(tmp_path.glob("cache/loops/*.json"))
