"""A step that fails does not take the steps before it along, where their state is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resume_runs import assert_same_run, record_of, run_here, train
from torch import nn

RUN = ("model.target=failing_steps:model", "checkpoint.every=null", "trainer.val_every=null", "trainer.max_steps=7")


def _request(run_dir: Path, how: str, *more: str) -> tuple[str, ...]:
    run_dir.mkdir(exist_ok=True)
    return (*RUN, f"+model.kwargs.run={run_dir}", f"+model.kwargs.how={how}", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a failure, in this process."""
    place = tmp_path_factory.mktemp("failures") / "whole"
    request = _request(place, "never")
    (place / "failed").write_text("it has failed before")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, place, *request)
    return place


@pytest.mark.costly
@pytest.mark.parametrize(("parts", "how"), [("false", "nan"), ("true", "raise")])
def test_the_steps_before_a_failure_are_saved_and_the_run_goes_on(
    how: str, parts: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    request = _request(broken, how, f"checkpoint.asynchronous={parts}")
    with pytest.raises(Exception, match="vocabulary" if how == "raise" else "step 5: the loss is nan"):
        run_here(monkeypatch, broken, *request)
    assert "saved after step 4, the last before the failure" in caplog.text
    assert [path.name for path in (broken / "checkpoints").iterdir()] == ["step-4.ckpt"]
    (broken / "failed").write_text("mended")
    run_here(monkeypatch, broken, *request, "resume=auto")
    assert_same_run(whole, broken)


def test_weights_that_an_update_has_left_half_changed_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = torch.optim.AdamW.step, []

    def half(optimizer: torch.optim.AdamW, closure: None = None) -> None:
        calls.append(1)
        step(optimizer, closure)
        if len(calls) == 5:
            raise ValueError("after the weights, before the rest")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    with pytest.raises(ValueError, match="before the rest"):
        run_here(monkeypatch, tmp_path / "run", *_request(tmp_path / "run", "never"), "logger=none")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_running_statistics_that_the_failed_step_has_changed_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import failing_steps

    plain = failing_steps.model

    def normalized(run: str, how: str) -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(6), *plain(run, how))

    monkeypatch.setattr(failing_steps, "model", normalized)
    with pytest.raises(Exception, match="vocabulary"):
        run_here(monkeypatch, tmp_path / "run", *_request(tmp_path / "run", "raise"), "data.drop_last=true")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.costly
def test_ranks_that_end_together_at_a_step_that_is_not_finite_save_together(whole: Path, tmp_path: Path) -> None:
    two, broken = ("parallelism.pipeline=2", "partition=uniform"), tmp_path / "broken"
    done = train(broken, *_request(broken, "nan"), *two)
    assert done.returncode == 1
    assert "step 5: the loss is nan" in str(record_of(broken)["reason"])
    (broken / "failed").write_text("mended")
    done = train(broken, *_request(broken, "nan"), *two, "resume=auto")
    assert done.returncode == 0, done.stderr
    assert "continuing after step 4" in done.stderr
    assert_same_run(whole, broken)
