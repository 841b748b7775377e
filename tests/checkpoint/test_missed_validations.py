"""A failure between a step and its validation costs the resumed run no validation."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from resume_runs import assert_same_run, record_of, run_here

RUN = ("logger.name=csv", "trainer.max_steps=7", "trainer.val_every=2", "checkpoint.every=null")


class FailsOnce(pl.Callback):
    """Fails in a hook after a step, where a file does not say that it has failed before."""

    def __init__(self, directory: str, hook: str, step: int) -> None:
        self._failed, self._hook, self._step = Path(directory, "failed"), hook, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._look("step", trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._look("validation", trainer.global_step)

    def _look(self, hook: str, step: int) -> None:
        if (hook, step) == (self._hook, self._step) and not self._failed.exists():
            self._failed.touch()
            raise ValueError("a callback of the user's")


def rows(run_dir: Path) -> list[tuple[str, str, str]]:
    """Step, loss and validation loss of each row."""
    text = (run_dir / "csv" / "metrics.csv").read_text(encoding="utf-8")
    return [(row["step"], row.get("loss", ""), row.get("val_loss", "")) for row in csv.DictReader(text.splitlines())]


@pytest.mark.costly
def test_the_resumed_run_validates_where_the_failed_one_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    run_here(monkeypatch, whole, *RUN)
    assert [step for step, _ in record_of(whole)["val_loss"]] == [2, 4, 6, 7]
    for hook, step in (("step", 7), ("validation", 4)):
        broken = tmp_path / f"{hook}-{step}"
        broken.mkdir()
        given = f"{{directory:{broken},hook:{hook},step:{step}}}"
        fails = f"+callbacks.fails={{target:test_missed_validations:FailsOnce,kwargs:{given}}}"
        with pytest.raises(ValueError, match="a callback of the user's"):
            run_here(monkeypatch, broken, *RUN, fails)
        assert [path.name for path in (broken / "checkpoints").iterdir()] == [f"step-{step}.ckpt"]
        run_here(monkeypatch, broken, *RUN, fails, "resume=auto")
        assert_same_run(whole, broken)
        assert record_of(broken)["val_loss"] == record_of(whole)["val_loss"]
        assert rows(broken) == rows(whole)
        run_here(monkeypatch, broken, *RUN, fails, "resume=auto")  # no step is left
        assert record_of(broken)["val_loss"] == record_of(whole)["val_loss"]
        assert rows(broken) == rows(whole)
