"""trainer.max_epochs and data.drop_last: passes over the data, as steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
import warm
from reference import train as train_plainly
from safetensors.torch import load_file
from user_project import OVERRIDES, assert_same_weights, environment, make_directory, plain_batches, record

WORDS = tuple(word for word in OVERRIDES if not word.startswith(("trainer.max_steps", "run_dir")))
SAMPLES = "data.kwargs.samples=20"  # two steps of 8, and one of 4


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_directory(tmp_path)


def command(directory: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "runner", name, *WORDS, SAMPLES, *words]
    return warm.run(line, cwd=directory, env=environment(directory))


def trained(directory: Path, run: str, *words: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    done = command(directory, "train", "logger=none", f"run_dir={run}", *words)
    assert done.returncode == 0, done.stderr
    return record(directory / run), load_file(directory / run / "weights.safetensors")


def test_epochs_are_the_steps_that_they_take(directory: Path) -> None:
    words = ("lr_scheduler=cosine", "data.shuffle=true")
    made, weights = trained(directory, "epochs", "trainer.max_epochs=2", *words)
    expected, expected_weights = trained(directory, "steps", "trainer.max_steps=6", *words)
    assert made["steps"] == made["config"]["trainer"]["max_steps"] == 6
    assert made["loss"] == expected["loss"]
    assert_same_weights(weights, expected_weights)


def test_a_small_last_step_is_left_out(directory: Path) -> None:
    made, weights = trained(directory, "run", "trainer.max_epochs=2", "data.drop_last=true", "parallelism.pipeline=2")
    torch.manual_seed(0)
    model = user_code.model()
    batches = [(inputs, targets) for inputs, targets in plain_batches(20, steps=6) if len(inputs) == 8]
    losses = train_plainly(
        model, user_code.mean, batches, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3, weight_decay=0.0)
    )
    assert len(batches) == 4
    assert made["loss"] == losses
    assert_same_weights(weights, model.state_dict())


def test_a_run_goes_on_to_more_epochs(directory: Path) -> None:
    whole, weights = trained(directory, "whole", "trainer.max_epochs=3", "data.shuffle=true")
    trained(directory, "part", "trainer.max_epochs=1", "data.shuffle=true")
    words = ("trainer.max_epochs=3", "data.shuffle=true", "resume=auto", "parallelism.pipeline=2")
    made, resumed = trained(directory, "part", *words)
    assert made["loss"] == whole["loss"]
    assert_same_weights(resumed, weights)
    done = command(directory, "train", "run_dir=part", "trainer.max_epochs=2", "data.shuffle=true", "resume=auto")
    assert done.returncode == 2
    assert "trainer.max_epochs = 2: must reach the checkpoint's step. It is 9, and they end at 6." in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("trainer.max_epochs=2", "trainer.max_steps=5"),
            "trainer.max_epochs = 2: must be null beside trainer.max_steps",
        ),
        (("trainer.max_epochs=0",), "trainer.max_epochs = 0: must be at least 1."),
        (("trainer.max_epochs=1.5",), "trainer.max_epochs = 1.5: must be a whole number or null."),
        (
            ("trainer.max_epochs=2", "data.target=mine:passing", "data.shuffle=null"),
            "trainer.max_epochs = 2: needs a dataset whose samples are counted.",
        ),
        (
            ("data.drop_last=true", "data.target=mine:passing", "data.shuffle=null"),
            "data.drop_last = true: must be false for an iterable dataset.",
        ),
        (("data.drop_last=true", "data.batch_size=32"), "data.drop_last = true: must leave a step of every epoch."),
        (
            ("trainer.max_epochs=1", "lr_scheduler=linear", "lr_scheduler.warmup_steps=9"),
            "lr_scheduler.warmup_steps = 9: must be at most 3.",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_directory_is_made(
    directory: Path, words: tuple[str, ...], told: str
) -> None:
    done = command(directory, "train", "run_dir=run", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / "run").exists()


def test_a_plan_says_how_many_steps_they_are(directory: Path) -> None:
    done = command(directory, "plan", "trainer.max_epochs=3", "data.drop_last=true")
    assert done.returncode == 0, done.stderr
    assert "note: 3 epochs of 20 samples, 8 a step: 6 steps" in done.stdout
