"""What a resumed run takes from the request: the settings of a custom optimizer, as different as its groups are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from resume_runs import assert_same_run, run_here


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_the_groups_of_a_users_optimizer_keep_their_own_settings(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases without decay at half the rate, as many train: before and after a stop."""
    request = [
        "optimizer=custom",
        "optimizer.target=resume_zoo:biases_apart",
        f"precision={precision}",
        "trainer.max_steps=6",
    ]
    run_here(monkeypatch, tmp_path / "whole", *request)
    run_here(monkeypatch, tmp_path / "resumed", *request, f"resume={tmp_path}/whole/checkpoints/step-3.ckpt")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_the_request_decides_the_settings_of_every_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate, and an argument of the user's own function, are changed at the resume."""
    request = [
        "optimizer=custom",
        "optimizer.target=resume_zoo:biases_apart",
        "trainer.max_steps=4",
        "lr_scheduler.name=constant",
    ]
    run_here(monkeypatch, tmp_path / "whole", *request)
    changed = ["optimizer.lr=0.02", "+optimizer.kwargs.decay=0.3", "trainer.max_steps=5"]
    run_here(monkeypatch, tmp_path / "new", *request, *changed, f"resume={tmp_path}/whole/checkpoints/step-4.ckpt")
    from runner.checkpoint.file import read_checkpoint

    groups = read_checkpoint(tmp_path / "new" / "checkpoints" / "step-5.ckpt")["optimizer_states"][0]["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.02, 0.3), (0.01, 0.0)]


def test_a_validation_that_is_not_a_number_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ["data.target=resume_zoo:spoiled_first_validation", "trainer.max_steps=4", "trainer.val_every=1"]
    record = run_here(monkeypatch, tmp_path / "run", *request, "checkpoint.keep=1", "checkpoint.keep_best=1")
    losses = {step: loss for step, loss in record["val_loss"]}
    assert math.isnan(losses.pop(1))
    best = min(losses, key=lambda step: losses[step])
    assert record["artifacts"]["best_checkpoint"] == f"checkpoints/step-{best}.ckpt"
    files = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert files == {f"step-{best}.ckpt", "step-4.ckpt"}
