"""A user's own directory, and commands started in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import user_code
import warm
from reference import train as train_plainly
from safetensors.torch import load_file

import runner

ROOT = Path(runner.__file__).parents[1]
STEPS = 4
OVERRIDES = (
    "model.target=mine:model", "data.target=mine:points", "loss.target=mine:mean", "device=cpu",
    f"trainer.max_steps={STEPS}", "data.batch_size=8", "data.shuffle=false", "run_dir=run",
)  # fmt: skip


def make_directory(directory: Path) -> Path:
    """With ``mine.py`` of plain PyTorch, which is not on the path of the tests."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "mine.py").write_text(Path(user_code.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return directory


def environment(directory: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUNNER_CACHE": str(directory / "cache"), **more
    }  # fmt: skip


def train(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    quiet = () if any(word.startswith("logger=") for word in overrides) else ("logger=none",)
    command = [sys.executable, "-m", "runner", "train", *OVERRIDES, *quiet, *overrides]
    return warm.run(command, cwd=directory, env=environment(directory))


def result(directory: Path, *overrides: str, run: str = "run") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train, which must end well: the record and the weights."""
    done = train(directory, *overrides, f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    return record(directory / run), load_file(directory / run / "weights.safetensors")


def record(run_dir: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    return made


def plain_batches(samples: int = 24, size: int = 8, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The samples in the dataset's order, epoch after epoch; the last step of an epoch may be short."""
    inputs, targets = user_code.points(samples)[0].tensors
    parts = [(inputs[at : at + size], targets[at : at + size]) for at in range(0, samples, size)]
    return (parts * steps)[:steps]


def plain_result(
    model: Callable[..., Any] = user_code.model,
    loss: Callable[..., Any] = user_code.mean,
    samples: int = 24,
    steps: int = STEPS,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the plain loop."""
    torch.manual_seed(0)
    made = model()
    adamw = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)}
    losses = train_plainly(made, loss, plain_batches(samples, steps=steps), **(adamw | options))
    return losses, made.state_dict()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
