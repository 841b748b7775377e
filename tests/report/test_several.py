"""Runs of any directories side by side, and what tells them apart first."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.cli.main import main
from runner.errors import RequestError
from runner.record import RunRecord, step_seconds
from runner.report import report
from runner.report.labels import short_labels
from runner.report.ledger import Job, Ledger
from runner.report.read import read_report
from runner.report.several import read_reports
from runner.report.swept import curves, swept_keys
from runner.report.write import tables

_BASE: dict[str, Any] = {"model": {"name": "mlp", "kwargs": {"width": 8}}, "schedule": {"name": "gpipe"}, "seed": 0}


def _run(place: Path, *, loss: float = 1.0, overrides: tuple[str, ...] = (), **sections: Any) -> Path:
    place.mkdir(parents=True)
    record = RunRecord(
        status="ok",
        config=_BASE | {"run_dir": str(place)} | sections,
        steps=2,
        loss=[2.0, loss],
        step_seconds=step_seconds([0.1, 0.3], predicted=0.15),
        bubble_ratio={"predicted": 0.25, "measured": 0.31},
        extras={"tokens_per_second": 12_345.0} | ({"overrides": list(overrides)} if overrides else {}),
    )
    record.save(place)
    return place


def _sweep(place: Path) -> Path:
    place.mkdir(parents=True)
    rates = (0.1, 0.01, 0.001)
    jobs = [("model=mlp", f"optimizer.lr={lr}", f"seed={seed}") for lr in rates for seed in (0, 1)]
    Ledger(tuple(Job(number, str(number), job) for number, job in enumerate(jobs))).save(place)
    for number, (job, lr) in enumerate(zip(jobs, [lr for lr in rates for _ in (0, 1)], strict=True)):
        _run(place / str(number), loss=lr, overrides=job, optimizer={"lr": lr}, seed=number % 2)
    return place


def test_two_runs_stand_side_by_side_with_what_differs_first(tmp_path: Path) -> None:
    first = _run(tmp_path / "a" / "x")
    second = _run(tmp_path / "b", schedule={"name": "1f1b", "chunks": 2}, model={"name": "gpt", "kwargs": {"width": 9}})
    found = read_reports([first, second])
    differences, runs = tables(found).values()
    assert differences.rows == (
        ("1", "a/x", "model.name=mlp schedule.name=gpipe model.kwargs.width=8"),
        ("2", "b", "model.name=gpt schedule.name=1f1b schedule.chunks=2 model.kwargs.width=9"),
    )
    assert runs.header == ("run", "status", "loss", "step", "predicted", "bubble", "tokens/s", "peak memory")
    assert runs.rows[0] == ("1", "ok", "1", "200 ms", "150 ms", "31%", "12,300", "-")
    assert not found.is_sweep


def test_what_alone_tells_two_runs_apart_is_shown_however_much_differs_from_a_third(tmp_path: Path) -> None:
    many = {f"key{number}": number for number in range(9)}
    other = _run(tmp_path / "a", model={"name": "gpt"}, trainer={"clip": None})
    near = [_run(tmp_path / name, data=many, trainer={"clip": clip}) for name, clip in (("b", 0.5), ("c", 1.0))]
    differences, _ = tables(read_reports([other, *near])).values()
    assert [("trainer.clip=0.5" in row[2], "trainer.clip=1.0" in row[2]) for row in differences.rows] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_a_folder_of_runs_is_read_however_deep_they_lie(tmp_path: Path) -> None:
    for place in ("run/2026-01-01", "run/2026-01-02", "other/2026-01-03"):
        _run(tmp_path / place)
    _sweep(tmp_path / "rates" / "2026-01-04")
    (tmp_path / "run" / "2026-01-01" / "checkpoints" / "odd").mkdir(parents=True)
    found = read_reports([tmp_path])
    assert len(found.runs) == 3 + 6
    assert [run.name for run in found.runs] == [str(number) for number in range(1, 10)]
    assert read_reports([tmp_path / "rates"]).is_sweep, "one sweep below a folder is reported as itself"
    assert read_reports([tmp_path / "other"]).runs[0].directory.name == "2026-01-03"


def test_every_directory_without_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError) as refused:
        read_reports([tmp_path / "a", tmp_path / "empty", tmp_path / "gone"])
    assert [Path(str(problem.value)).name for problem in refused.value.problems] == ["empty", "gone"]
    assert main(["report"]) == 2
    assert capsys.readouterr().err.endswith("Try runner report outputs.\n")


def test_the_command_writes_the_report_into_the_folder_in_common(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _run(tmp_path / "a"), _run(tmp_path / "b", seed=5)
    assert main(["report", str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert text.index("what differs") < text.index("seed=5") < text.index("tokens/s")
    assert {"differences.csv", "runs.csv", "loss.png"} <= {path.name for path in (tmp_path / "report").iterdir()}


def test_a_sweep_has_its_speeds_unless_the_terminal_is_narrow(tmp_path: Path) -> None:
    found = read_report(_sweep(tmp_path / "s"))
    table = tables(found)["runs"]
    assert table.header[-5:] == ("step", "predicted", "bubble", "tokens/s", "peak memory")
    narrow = io.StringIO()
    Console(file=narrow, width=60).print(table)
    assert "tokens/s" in narrow.getvalue().rpartition("not shown, for lack of room: ")[2]


def test_a_legend_has_what_differs_alone(tmp_path: Path) -> None:
    found = read_report(_sweep(tmp_path / "s"))
    assert short_labels(found)[:2] == ["optimizer.lr=0.1 seed=0", "optimizer.lr=0.1 seed=1"]


def test_the_loss_is_drawn_against_the_swept_number(tmp_path: Path) -> None:
    found = report(_sweep(tmp_path / "s"))
    assert swept_keys(found) == ["optimizer.lr"]
    expected = [(0.001, 0.001), (0.01, 0.01), (0.1, 0.1)]
    assert curves(found, "optimizer.lr") == [("seed=0", expected), ("seed=1", expected)]
    assert (tmp_path / "s" / "report" / "loss_by_optimizer.lr.png").is_file()
