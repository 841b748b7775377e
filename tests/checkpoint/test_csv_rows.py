"""The CSV log holds each row once, whatever fails while it is written."""

from __future__ import annotations

import contextlib
import csv
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger

from runner.config.schema import RunConfig
from runner.training.loggers import build_loggers


def logger_of(run_dir: Path, steps: int = 0) -> Logger:
    config = RunConfig()
    config.logger.name = "csv"
    (made,) = build_loggers(config, run_dir, 0, steps)
    assert isinstance(made, Logger)
    return made


def log(logger: Logger, step: int, **figures: float) -> None:
    logger.log_metrics(figures, step - 1)  # Lightning counts from 0
    logger.save()


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@contextlib.contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """As a full disk does, the system takes some bytes and refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


THREE = [{"loss": "0.25", "step": "1"}, {"loss": "0.5", "step": "2"}, {"step": "2", "val_loss": "0.75"}]


def test_a_new_figure_on_a_full_disk_costs_no_row(tmp_path: Path) -> None:
    logger = logger_of(tmp_path)
    log(logger, 1, loss=0.25)
    log(logger, 2, loss=0.5)
    with no_file_longer_than(3), pytest.raises(OSError, match="File too large"):
        log(logger, 2, val_loss=0.75)
    assert rows(tmp_path) == THREE[:2]
    logger.save()
    assert rows(tmp_path) == THREE
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["metrics.csv"]


def test_a_row_that_was_written_half_is_there_once(tmp_path: Path) -> None:
    logger = logger_of(tmp_path)
    log(logger, 1, loss=0.25)
    with (
        no_file_longer_than((tmp_path / "csv" / "metrics.csv").stat().st_size + 2),
        pytest.raises(OSError, match="File too"),
    ):
        log(logger, 2, loss=0.5)
    logger.finalize("failed")
    assert rows(tmp_path) == THREE[:2]


def test_what_the_last_step_has_in_the_log_is_not_written_again(tmp_path: Path) -> None:
    """A checkpoint of a step may have been saved before or after the rows of the step."""
    logger = logger_of(tmp_path)
    log(logger, 1, loss=0.25)
    log(logger, 2, loss=0.5)
    log(logger, 2, val_loss=0.75)
    log(logger, 3, loss=0.125)
    again = logger_of(tmp_path, steps=2)
    log(again, 2, val_loss=0.75, epoch=0)
    assert rows(tmp_path) == THREE
    log(again, 3, loss=0.125)
    log(again, 3, val_loss=0.5)
    assert rows(tmp_path)[3:] == [{"loss": "0.125", "step": "3"}, {"step": "3", "val_loss": "0.5"}]


def test_a_run_from_the_beginning_has_no_rows_of_an_earlier_one(tmp_path: Path) -> None:
    log(logger_of(tmp_path), 1, loss=0.5)
    log(logger_of(tmp_path), 1, loss=0.25)
    assert rows(tmp_path) == THREE[:1]


def test_a_new_file_whose_folder_could_not_be_synced_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its new name by then, with the rows that the next call writes."""

    def refused(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", folder)

    logger = logger_of(tmp_path)
    for step in (1, 2):
        with monkeypatch.context() as broken:
            broken.setattr("runner.files.sync_directory", refused)
            figures = {"loss": 0.25} if step == 1 else {"loss": 0.5, "val_loss": 0.75}
            with pytest.raises(OSError, match="Input/output"):
                log(logger, step, **figures)
    logger.save()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]
