"""trainer.max_epochs and data.drop_last: passes over the data, as steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import thread_runs
import torch
import user_code
from reference import train as train_plainly
from thread_runs import told
from user_project import assert_same_weights, plain_batches

from runner.errors import RequestError

WORDS = tuple(word for word in thread_runs.WORDS if not word.startswith("trainer.max_steps"))
SAMPLES = "data.kwargs.samples=20"  # two steps of 8, and one of 4


def trained(directory: Path, run: str, *words: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return thread_runs.result(directory, SAMPLES, *words, run=run, words=WORDS)


@pytest.mark.costly
def test_epochs_are_the_steps_that_they_take(tmp_path: Path) -> None:
    words = ("lr_scheduler=cosine", "data.shuffle=true")
    made, weights = trained(tmp_path, "epochs", "trainer.max_epochs=2", *words)
    expected, expected_weights = trained(tmp_path, "steps", "trainer.max_steps=6", *words)
    assert made["steps"] == made["config"]["trainer"]["max_steps"] == 6
    assert made["loss"] == expected["loss"]
    assert_same_weights(weights, expected_weights)


@pytest.mark.costly
def test_a_small_last_step_is_left_out(tmp_path: Path) -> None:
    made, weights = trained(tmp_path, "run", "trainer.max_epochs=2", "data.drop_last=true", "parallelism.pipeline=2")
    torch.manual_seed(0)
    model = user_code.model()
    batches = [(inputs, targets) for inputs, targets in plain_batches(20, steps=6) if len(inputs) == 8]
    losses = train_plainly(
        model, user_code.mean, batches, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3, weight_decay=0.0)
    )
    assert len(batches) == 4
    assert made["loss"] == losses
    assert_same_weights(weights, model.state_dict())


@pytest.mark.costly
def test_a_run_goes_on_to_more_epochs(tmp_path: Path) -> None:
    whole, weights = trained(tmp_path, "whole", "trainer.max_epochs=3", "data.shuffle=true")
    trained(tmp_path, "part", "trainer.max_epochs=1", "data.shuffle=true")
    words = ("trainer.max_epochs=3", "data.shuffle=true", "resume=auto", "parallelism.pipeline=2")
    made, resumed = trained(tmp_path, "part", *words)
    assert made["loss"] == whole["loss"]
    assert_same_weights(resumed, weights)
    line = "trainer.max_epochs = 2: must reach the checkpoint's step. It is 9, and they end at 6."
    with pytest.raises(RequestError, match=line):
        trained(tmp_path, "part", "trainer.max_epochs=2", "data.shuffle=true", "resume=auto")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("trainer.max_epochs=2", "trainer.max_steps=5"),
            "trainer.max_epochs = 2: must be null beside trainer.max_steps",
        ),
        (("trainer.max_epochs=0",), "trainer.max_epochs = 0: must be at least 1."),
        (("trainer.max_epochs=1.5",), "trainer.max_epochs = 1.5: must be a whole number or null."),
        (
            ("trainer.max_epochs=2", "data.target=user_code:passing", "data.shuffle=null"),
            "trainer.max_epochs = 2: needs a dataset whose samples are counted.",
        ),
        (
            ("data.drop_last=true", "data.target=user_code:passing", "data.shuffle=null"),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, said = told("train", *WORDS, SAMPLES, *words)
    assert status == 2
    assert line in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_a_plan_says_how_many_steps_they_are() -> None:
    status, said = told("plan", *WORDS, SAMPLES, "trainer.max_epochs=3", "data.drop_last=true")
    assert status == 0, said
    assert "note: 3 epochs of 20 samples, 8 a step: 6 steps" in said
