"""A run that goes on in its directory goes on in its logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from resume_runs import record_of, run_here

REQUEST = ("resume=auto", "trainer.val_every=2", "lr_scheduler.total_steps=7")


def in_halves(monkeypatch: pytest.MonkeyPatch, place: Path, logger: str, *more: str) -> None:
    """Its second process begins before the first one's last steps: their checkpoints are lost."""
    run_here(monkeypatch, place, f"logger.name={logger}", *more, *REQUEST, "trainer.max_steps=6")
    for step in (5, 6):
        (place / "checkpoints" / f"step-{step}.ckpt").unlink()
    run_here(monkeypatch, place, f"logger.name={logger}", *more, *REQUEST, "trainer.max_steps=7")


def read_csv(place: Path) -> list[dict[str, str]]:
    with (place / "csv" / "metrics.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    kept = ("step", "loss", "lr", "grad_norm", "val_loss")  # times differ
    return [{name: row[name] for name in kept if row.get(name)} for row in rows]


def read_tensorboard(place: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in ("loss", "lr", "val_loss")}


@pytest.mark.costly
@pytest.mark.parametrize(("logger", "read"), [("csv", read_csv), ("tensorboard", read_tensorboard)])
def test_the_logs_are_those_of_an_unbroken_run(
    logger: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, tmp_path / "whole", f"logger.name={logger}", *REQUEST, "trainer.max_steps=7")
    in_halves(monkeypatch, tmp_path / "halves", logger)
    expected = read(tmp_path / "whole")
    assert len(expected) >= 3
    assert _steps_of_validations(expected) == [2, 4, 6, 7]
    assert read(tmp_path / "halves") == expected


def _steps_of_validations(log: Any) -> list[int]:
    if isinstance(log, dict):
        return [step for step, _ in log["val_loss"]]
    return [int(row["step"]) for row in log if "val_loss" in row]


@pytest.mark.costly
def test_a_second_start_that_fails_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when it writes the earlier lines again; a third start has room, and goes on with all of them."""
    request = ("logger.name=csv", *REQUEST)
    run_here(monkeypatch, tmp_path / "whole", *request, "trainer.max_steps=7")
    run_here(monkeypatch, tmp_path / "run", *request, "trainer.max_steps=4")
    with (tmp_path / "run" / "csv" / "metrics.csv").open("a") as log:
        log.write("0.25,5")  # it was killed while it wrote
    with monkeypatch.context() as full:
        full.setattr(CSVLogger, "save", no_space)
        with pytest.raises(OSError, match="No space left"):
            run_here(monkeypatch, tmp_path / "run", *request, "trainer.max_steps=7")
    run_here(monkeypatch, tmp_path / "run", *request, "trainer.max_steps=7")
    assert read_csv(tmp_path / "run") == read_csv(tmp_path / "whole")
    assert [file.name for file in (tmp_path / "run" / "csv").iterdir()] == ["metrics.csv"]


def no_space(logger: CSVLogger) -> None:
    raise OSError(28, "No space left on device")


class Service(Logger):
    """As the logger of a service: it names a run that it is told no name of."""

    begun: list[str] = []

    def __init__(self, project: str, version: str | None = None) -> None:
        super().__init__()
        self.begun.append(version or f"new-{len(self.begun)}")

    name = "service"

    @property
    def version(self) -> str:
        return self.begun[-1]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.costly
def test_a_service_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "begun", [])
    custom = ("logger.target=test_loggers:Service", "+logger.kwargs.project=p")
    in_halves(monkeypatch, tmp_path / "run", "custom", *custom)
    assert Service.begun == ["new-0", "new-0"]
    assert record_of(tmp_path / "run")["logger_id"] == "new-0"
    run_here(monkeypatch, tmp_path / "other", "logger.name=custom", *custom, *REQUEST, "trainer.max_steps=1")
    assert Service.begun[2:] == ["new-2"]
