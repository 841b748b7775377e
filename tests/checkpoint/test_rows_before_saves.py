"""A step that a checkpoint has is in the log, too, whenever the process ends."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from resume_runs import run_here

RUN = ("logger.name=csv", "trainer.max_steps=6", "trainer.val_every=3", "checkpoint.every=1")


class FailsOnce(pl.Callback):
    """Fails after the fourth step, where a file does not say that it has failed before."""

    def __init__(self, directory: str) -> None:
        self._failed = Path(directory, "failed")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == 4 and not self._failed.exists():
            self._failed.touch()
            raise ValueError("a callback of the user's")


def rows(run_dir: Path) -> list[tuple[str, str, str]]:
    """Step, loss and validation loss of each row."""
    text = (run_dir / "csv" / "metrics.csv").read_text(encoding="utf-8")
    return [(row["step"], row.get("loss", ""), row.get("val_loss", "")) for row in csv.DictReader(text.splitlines())]


def test_a_checkpoints_step_is_in_the_log_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, logged = pl.Trainer.save_checkpoint, {}

    def look(trainer: pl.Trainer, path: Path, *args: object, **more: object) -> None:
        save(trainer, path, *args, **more)  # type: ignore[arg-type]
        if trainer.global_step:  # the first save is tried before the first step
            logged[trainer.global_step] = [step for step, loss, _ in rows(tmp_path / "run") if loss]

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", look)
    run_here(monkeypatch, tmp_path / "run", *RUN)
    assert logged == {step: [str(each) for each in range(1, step + 1)] for step in range(1, 7)}


@pytest.mark.costly
def test_a_callback_that_fails_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch, tmp_path / "whole", *RUN)
    broken = tmp_path / "broken"
    failing = "+callbacks.fails={target:test_rows_before_saves:FailsOnce,kwargs:{directory:" + str(tmp_path) + "}}"
    with pytest.raises(ValueError, match="a callback of the user's"):
        run_here(monkeypatch, broken, *RUN, failing)
    run_here(monkeypatch, broken, *RUN, failing, "resume=auto")
    assert rows(broken) == rows(tmp_path / "whole")
    assert [step for step, loss, _ in rows(broken) if loss] == [str(step) for step in range(1, 7)]
