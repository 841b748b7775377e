"""Several loggers in one request, and what each of them writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.request import checked
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.training.loggers import build_loggers


def test_each_logger_of_a_list_writes(tmp_path: Path) -> None:
    config = checked(["model=mlp", "logger=[tensorboard,csv]"])
    assert (config.logger.name, config.logger.others) == ("tensorboard", ["csv"])
    for logger in build_loggers(config, tmp_path, 0):
        logger.log_metrics({"loss": 1.5}, 0)
        logger.finalize("success")
    assert "1.5" in (tmp_path / "csv" / "metrics.csv").read_text()
    assert any((tmp_path / "tensorboard").glob("events.*"))


def test_a_list_of_one_is_that_one() -> None:
    config = resolve(["model=mlp", "logger=[csv]"])
    assert (config.logger.name, config.logger.others) == ("csv", [])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("logger=[tensorboard,tensorboard]", "must be other ones of tensorboard, csv, wandb, mlflow"),
        ("logger=[csv,none]", "must be other ones of"),
        ("logger=[csv,tensorbord]", "must be other ones of"),
        ("logger=[none,csv]", "must be empty with logger=none"),
        ("logger=[tensorbord,csv]", "logger = tensorbord: there is no such option"),
        ("schedule=[gpipe,1f1b]", "there is no such option"),
    ],
)
def test_wrong_lists_are_refused(asked: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        checked(["model=mlp", asked])
