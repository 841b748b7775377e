"""A long run never has nothing: it is saved by time, on all ranks after the same step, and no bit changes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_runs import assert_same_run, run_here

from runner.training.checkpoints import Checkpoints

ALWAYS = "checkpoint.every_seconds=0.000001"
BY_TIME = ("checkpoint.every=null", "checkpoint.keep=1")
RUN = ("model.target=resume_zoo:model", *BY_TIME, "trainer.max_steps=7", "trainer.val_every=2")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps after which this process has saved."""
    steps: list[int] = []
    save_as = Checkpoints._save_as

    def noted(checkpoints: Checkpoints, trainer: object, path: Path, step: int) -> None:
        steps.append(step)
        save_as(checkpoints, trainer, path, step)  # type: ignore[arg-type]  # it is the Trainer

    monkeypatch.setattr(Checkpoints, "_save_as", noted)
    return steps


@pytest.mark.costly
@pytest.mark.parametrize("parts", ["false", "true"])
def test_what_is_saved_by_time_changes_no_bit_and_is_kept_until_the_next(
    parts: str, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = (*RUN, f"checkpoint.asynchronous={parts}")
    run_here(monkeypatch, tmp_path / "plain", *request)
    assert saved == [7]  # 900 s are more than this run takes
    saved.clear()
    run_here(monkeypatch, tmp_path / "timed", *request, ALWAYS, "checkpoint.every=3", "checkpoint.keep=2")
    # Asked for at the end of a step, for the end of the next one; step 4 is saved after its validation.
    assert saved == [2, 3, 4, 6, 7]
    assert_same_run(tmp_path / "plain", tmp_path / "timed")
    left = sorted(path.name for path in (tmp_path / "timed" / "checkpoints").iterdir())
    assert left == ["step-6.ckpt", "step-7.ckpt"]  # as without the clock


@pytest.mark.costly
def test_a_run_that_is_saved_by_time_alone_goes_on(
    saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, tmp_path / "whole", *RUN)
    saved.clear()

    def stop(*_: object) -> None:
        if saved[-1:] == [4]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_remove_old", stop)
        with pytest.raises(BaseException):  # noqa: B017, PT011 - as it comes out of Lightning
            run_here(monkeypatch, tmp_path / "broken", *RUN, ALWAYS)
    run_here(monkeypatch, tmp_path / "broken", *RUN, "resume=auto")
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
