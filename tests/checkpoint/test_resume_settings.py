"""What a resumed run takes from the request: the settings of a custom optimizer, as different as its groups are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resume_runs import assert_same_run, run_here
from resume_zoo import OVERRIDES

from runner.checkpoint.file import read_checkpoint
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.run.resume import with_checkpoint
from runner.optim.states.settings import settings_of
from runner.training.resume import follow_config


@pytest.mark.costly
def test_the_groups_of_a_users_optimizer_keep_their_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases without decay at half the rate, as many train: before and after a stop."""
    request = [
        "optimizer=custom",
        "optimizer.target=resume_zoo:biases_apart",
        "precision=bf16_master",
        "trainer.max_steps=6",
    ]
    run_here(monkeypatch, tmp_path / "whole", *request)
    run_here(monkeypatch, tmp_path / "resumed", *request, f"resume={tmp_path}/whole/checkpoints/step-3.ckpt")
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.costly
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
    groups = read_checkpoint(tmp_path / "new" / "checkpoints" / "step-5.ckpt")["optimizer_states"][0]["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.02, 0.3), (0.01, 0.0)]


def test_a_validation_that_is_not_a_number_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ["data.target=resume_zoo:spoiled_first_validation", "trainer.max_steps=4", "trainer.val_every=1"]
    record = run_here(monkeypatch, tmp_path / "run", *request, "checkpoint.keep=1", "checkpoint.keep_best=1")
    losses = dict(record["val_loss"])
    assert losses.pop(1) is None, "JSON has no NaN: the test shows nothing"
    best = min(losses, key=lambda step: losses[step])
    assert record["artifacts"]["best_checkpoint"] == f"checkpoints/step-{best}.ckpt"
    files = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert files == {f"step-{best}.ckpt", "step-4.ckpt"}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint after three steps of 44 samples."""
    run_dir = tmp_path_factory.mktemp("told") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, run_dir, "trainer.max_steps=3", "+data.kwargs.validation=8")
    return str(run_dir / "checkpoints" / "step-3.ckpt")


@pytest.mark.costly
def test_data_of_another_length_is_refused_where_an_epoch_has_as_many_steps(
    three_steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """44 and 47 samples are six steps of 8; in another order, because the shuffle depends on the number."""
    with pytest.raises(RequestError, match=r"must have 44 samples, as the checkpoint's data\. These have 47"):
        run_here(monkeypatch, tmp_path / "new", f"resume={three_steps}", "+data.kwargs.samples=47")


def test_what_differs_from_the_saved_run_is_told(
    three_steps: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An argument that is new, one that is gone, and kernels for another processor."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with caplog.at_level("INFO", logger="runner"):
        with_checkpoint(resolve([*OVERRIDES, "trainer.max_steps=3", f"resume={three_steps}", "+model.kwargs.width=12"]))
    assert "changed since then: model.kwargs.width = 12, was not set" in caplog.messages
    assert "changed since then: data.kwargs.validation = not set, was 8" in caplog.messages
    assert sum(line.startswith("changed since") for line in caplog.messages) == 2
    (said,) = [line for line in caplog.messages if line.startswith("saved on another machine")]
    assert "cpu_capability = DEFAULT, was " in said
    assert "The bits may differ" in said


def test_the_first_step_after_a_resume_has_its_own_rate() -> None:
    """Of the request's peak, and where the saved steps have left the scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    (saved,) = settings_of(optimizer)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)])
    follow_config(trainer, [[{**saved, "lr": 8.0, "initial_lr": 8.0}]])
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([8 / 4, 8 / 5, 8 / 6])
