"""The metrics of validations are columns of a sweep's table, and figures by which jobs are ordered and exported."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from runner.cli.main import main
from runner.errors import RequestError
from runner.record import RunRecord
from runner.report import read_report
from runner.report.best import best_of
from runner.report.fit import fitted
from runner.report.ledger import Job, Ledger
from runner.report.order import in_order
from runner.report.tables import TextTable, runs_table

ACCURACIES = [0.25, 0.75, 0.5, None]  # of the last validation; job 3 has none


def write(place: Path, *further: str) -> Path:
    """A sweep of four complete jobs, with ``val_accuracy`` and metrics of the ``further`` names."""
    place.mkdir()
    Ledger(tuple(Job(number, str(number), (f"seed={number}",)) for number in range(4))).save(place)
    for number, accuracy in enumerate(ACCURACIES):
        run_dir = place / str(number)
        run_dir.mkdir()
        metrics: dict[str, Any] = {} if accuracy is None else {"val_accuracy": [[1, 0.875], [2, accuracy]]}
        metrics |= {name: [[2, 1.0]] for name in further}
        extras = {"overrides": [f"seed={number}"], **metrics}
        RunRecord(status="ok", steps=2, loss=[2.0, 1.0], val_loss=[[2, 1.0]], extras=extras).save(run_dir)
        save_file({"number": torch.tensor(number)}, run_dir / "weights.safetensors")
    return place


def column(table: TextTable, name: str) -> list[str]:
    return [row[table.header.index(name)] for row in table.rows]


def test_a_metric_is_a_column(tmp_path: Path) -> None:
    table = runs_table(read_report(write(tmp_path / "s")))
    assert column(table, "val accuracy") == ["0.25", "0.75", "0.5", "-"]
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["val_accuracy"] for row in rows] == ["0.25", "0.75", "0.5", ""]
    assert [row["val_loss"] for row in rows] == ["1.0"] * 4


def test_a_narrow_terminal_leaves_out_the_last_metrics(tmp_path: Path) -> None:
    table = runs_table(read_report(write(tmp_path / "s", "val_error_of_large", "val_another_long_name_of_a_metric")))
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if " seed=" in line]) == 4
    assert "error_of_large" in text.getvalue()
    assert "not shown, for lack of room: val another_long_name_of_a_metric" in lines
    assert "val_another_long_name_of_a_metric" in table.value_header


def test_overrides_have_short_names_wherever_they_are_shown() -> None:
    rows = [("0", "optimizer.lr=0.1 schedule.chunks=2 data.batch_size=8", "ok"), ("1", "optimizer.lr=0.2 x", "ok")]
    whole = fitted(("run", "overrides", "val loss"), rows, 80, rigid=("run", "val loss"), spare=())
    assert whole.rows == (("0", "lr=0.1 chunks=2 batch_size=8", "ok"), ("1", "lr=0.2 x", "ok"))
    assert whole.header == ("run", "overrides", "val loss")
    narrow = fitted(("run", "overrides", "val loss"), rows, 28, rigid=("run", "val loss"), spare=())
    assert narrow.rows == whole.rows
    assert narrow.header == ("run", "overrides", "val\nloss")
    assert narrow.is_free == (False, True, False)


def test_what_a_stranger_wrote_as_a_metric_is_not_known(tmp_path: Path) -> None:
    for strange in ("x", [], [[1]], [[1, None]], {"a": 1}, None):
        RunRecord(extras={"val_x": strange}).save(tmp_path)
        assert read_report(tmp_path).runs[0].metrics == {}


def test_runs_are_ordered_by_a_metric(tmp_path: Path) -> None:
    found = read_report(write(tmp_path / "s"))
    assert [run.name for run in in_order(found, "val_accuracy").runs] == ["0", "2", "1", "3"]
    assert [run.name for run in in_order(found, "val accuracy:max").runs] == ["1", "2", "0", "3"]
    assert [run.name for run in in_order(found, "steps:min").runs] == ["0", "1", "2", "3"]


def test_the_best_by_a_metric_is_the_highest_where_that_is_said(tmp_path: Path) -> None:
    runs = read_report(write(tmp_path / "s")).runs
    assert best_of(runs, "val_accuracy:max") is runs[1]
    assert best_of(runs, "val_accuracy:min") is runs[0]


def test_the_best_job_by_a_metric_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, file = write(tmp_path / "s"), tmp_path / "best.safetensors"
    assert main(["export", str(place), str(file), "--best", "val_accuracy:max"]) == 0
    assert load_file(file)["number"] == 1
    assert "job 1, val_accuracy 0.75: seed=1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("val_accuracy", "must say which value is the best. The runner does not know if more of it is better: --best "
         "val_accuracy:max is the highest, val_accuracy:min the lowest.\n"),
        ("accuracy:max", "must be one of val_loss, loss, val_accuracy. Try --best val_accuracy:max.\n"),
        ("accuracy", "must be one of val_loss, loss, val_accuracy.\n"),
        ("val_accuracy:most", "what stands after the colon must be min or max.\n"),
    ],
)  # fmt: skip
def test_what_is_no_best(best: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, file = write(tmp_path / "s"), tmp_path / "best.safetensors"
    assert main(["export", str(place), str(file), "--best", best]) == 2
    assert capsys.readouterr().err == f"--best = {best}: {said}"
    assert not file.exists()


def test_an_order_is_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the order after the colon must be min or max"):
        in_order(read_report(write(tmp_path / "s")), "val_accuracy:most")
