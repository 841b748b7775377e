"""A long run never has nothing: it is saved by time, on all ranks after the same step, and no bit changes by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from covering import sampled
from resume_runs import assert_same_run, run_here, train

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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sampled(["1f1b", "pipedream_2bw"], "1f1b"))
def test_a_rank_that_dies_costs_what_came_after_the_last_save_by_time(schedule: str, tmp_path: Path) -> None:
    request = (
        "parallelism.pipeline=2", "partition=uniform", "model.target=killing:model", "trainer.max_steps=12",
        f"schedule={schedule}", "trainer.grad_clip_norm=null", *BY_TIME,
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = train(whole, *request, f"+model.kwargs.run={whole}")
    assert done.returncode == 0, done.stderr
    broken.mkdir()
    (broken / "places").write_text("1 step 34")
    done = train(broken, *request, f"+model.kwargs.run={broken}", "resume=auto", "launcher.max_restarts=1", ALWAYS)
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"continuing after step (\d+) of", done.stderr)[0]) >= 2
    assert_same_run(whole, broken)
