"""Reports of runs and sweeps in every state, from records alone."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.errors import RequestError
from runner.record import RunRecord, StepLog, step_seconds
from runner.report import read_report, report
from runner.report.read import differences
from runner.report.speed import SPEEDS
from runner.report.tables import predicted_measured, predicted_measured_table, runs_table, seconds_table
from runner.report.write import tables


def _ok(lr: float = 0.1, **changes: Any) -> RunRecord:
    return RunRecord(
        status="ok",
        config={
            "name": "demo",
            "optimizer": {"lr": lr, "betas": [0.9, 0.999]},
            "trainer": {"max_steps": 3},
            "run_dir": f"/somewhere/{lr}",
        },
        steps=3,
        loss=[3.0, 2.0, 1 / 3],
        val_loss=[[3, 0.25]],
        step_seconds=step_seconds([0.2, 0.1, 0.3], predicted=0.21),
        samples_per_second=160.0,
        bubble_ratio={"predicted": 0.25, "measured": 0.2},
        seconds={"data": 0.01, "compute": 0.1, "communication": 0.02, "bubble": 0.06, "optimizer": 0.01, "offload": 0},
        peak_memory_bytes={"predicted": [90, 40], "measured": [100, 50], "kind": "tensor_bytes"},
        **changes,
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Jobs: ok, failed after a step, unsupported without a configuration, running with two steps in the log."""
    records = [
        _ok(extras={"overrides": ["optimizer.lr=0.1"]}),
        RunRecord(
            status="failed",
            reason="rank 1 (stage 1, layers 4..7) died: SIGKILL",
            config=_ok(0.2).config,
            steps=1,
            loss=[math.nan],
            extras={"overrides": ["optimizer.lr=0.2"]},
        ),
        RunRecord(status="unsupported", reason="a: no.\nb: no.", extras={"overrides": ["optimizer.lr=no|number"]}),
        RunRecord(status="running", config=_ok(0.3).config, extras={"overrides": ["optimizer.lr=0.3"]}),
    ]
    for number, record in enumerate(records):
        (tmp_path / str(number)).mkdir()
        record.save(tmp_path / str(number))
    with StepLog(tmp_path / "3") as log:
        log.write(step=1, loss=5.0, seconds=1.0)
        log.write(step=2, loss=4.0, seconds=3.0)
    return tmp_path


def test_predictions_stand_beside_measurements_with_their_error() -> None:
    rows = {one.name: one for one in predicted_measured(_ok())}
    assert list(rows) == ["step", "bubble ratio", "peak memory, rank 0", "peak memory, rank 1"]
    assert rows["step"].measured == 0.2
    assert rows["step"].relative_error == pytest.approx(0.05)
    assert rows["bubble ratio"].relative_error == pytest.approx(0.25)
    assert rows["peak memory, rank 1"].relative_error == pytest.approx(-0.2)
    assert predicted_measured_table(_ok()).rows[0] == ("step", "210 ms", "200 ms", "+5.0%")


def test_what_is_not_known_is_not_made_up() -> None:
    table = predicted_measured_table(RunRecord(status="running", peak_memory_bytes={"predicted": [7], "kind": "x"}))
    assert table.rows == (
        ("step", "-", "-", "-"),
        ("bubble ratio", "-", "-", "-"),
        ("peak memory, rank 0", "7 B", "-", "-"),
    )
    assert predicted_measured(_ok().replace(bubble_ratio={"predicted": 0.0, "measured": 0.0}))[1].relative_error is None


def test_the_parts_of_a_step_and_their_shares() -> None:
    table = seconds_table(_ok())
    assert ("compute", "100 ms", "50.0%") in table.rows
    shown, kept = ([row[0] for row in rows] for rows in (table.rows, table.values))
    assert "bubble" not in shown, "the bubble ratio is another figure"
    assert shown[kept.index("bubble")] == "waiting"


def test_one_stage_has_no_bubble() -> None:
    record = _ok().replace(bubble_ratio={"predicted": 0.0, "measured": 0.016})
    (bubble,) = (speed for speed in SPEEDS if speed.header == "bubble")
    assert bubble.of(record) == 0.016
    assert bubble.of(record.replace(layout={**record.layout, "pipeline": 1})) is None


def test_every_job_keeps_its_row_and_its_reason(sweep: Path) -> None:
    table = runs_table(read_report(sweep))
    assert table.header == (
        "run",
        "overrides",
        "status",
        "loss",
        "val loss",
        "step",
        "predicted",
        "bubble",
        "peak memory",
    )
    assert table.rows == (
        ("0", "optimizer.lr=0.1", "ok", "0.3333", "0.25", "200 ms", "210 ms", "20%", "100 B"),
        ("1", "optimizer.lr=0.2", "failed", "nan", "-", "-", "-", "-", "-"),
        ("2", "optimizer.lr=no|number", "unsupported", "-", "-", "-", "-", "-", "-"),
        ("3", "optimizer.lr=0.3", "running 2/3", "4", "-", "2 s", "-", "-", "-"),
    )
    assert table.notes == ("1: rank 1 (stage 1, layers 4..7) died: SIGKILL", "2: a: no.\nb: no.")


def test_a_reason_of_many_jobs_is_told_once(sweep: Path) -> None:
    RunRecord.load(sweep / "2").save(sweep / "0")
    assert runs_table(read_report(sweep)).notes[-2:] == (
        "0, 2: a: no.\nb: no.",
        "1: rank 1 (stage 1, layers 4..7) died: SIGKILL",
    )


def test_the_report_is_written_beside_the_records(sweep: Path) -> None:
    found = report(sweep)
    assert [run.record.status for run in found.runs] == ["ok", "failed", "unsupported", "running"]
    place = sweep / "report"
    assert sorted(path.name for path in place.iterdir()) == [
        "loss.png",
        "memory.png",
        "report.md",
        "runs.csv",
        "step_seconds.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in place.glob("*.png"))
    with (place / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["loss"]) == 1 / 3  # in full precision
    assert rows[2]["reason"] == "a: no.\nb: no."
    text = (place / "report.md").read_text()
    assert "| 2 | optimizer.lr=no\\|number | unsupported |" in text
    assert "![loss](loss.png)" in text


def test_a_single_run_has_all_its_tables(tmp_path: Path) -> None:
    _ok().save(tmp_path)
    found = report(tmp_path)
    assert list(tables(found)) == ["runs", "predicted_measured", "seconds"]
    assert tables(found)["predicted_measured"].notes == ()
    written = {path.name for path in (tmp_path / "report").iterdir()}
    assert written >= {"seconds.csv", "predicted_measured.csv", "loss.png"}
    assert not found.is_sweep


@pytest.mark.parametrize("status", ["running", "failed", "unsupported"])
def test_a_run_without_a_step_has_a_report_without_figures(tmp_path: Path, status: Any) -> None:
    RunRecord(status=status, reason="because").save(tmp_path)
    report(tmp_path)
    assert list((tmp_path / "report").glob("*.png")) == []
    assert f"| {status} |" in (tmp_path / "report" / "report.md").read_text()


def test_a_sweep_of_many_runs_is_numbered_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        (tmp_path / str(number)).mkdir()
        _ok().save(tmp_path / str(number))
    assert [run.name for run in read_report(tmp_path).runs] == ["0", "2", "10"]


def test_runs_without_overrides_are_told_apart_by_their_configuration(tmp_path: Path) -> None:
    for number, lr in enumerate((0.1, 0.2)):
        (tmp_path / str(number)).mkdir()
        _ok(lr).save(tmp_path / str(number))
    table = runs_table(read_report(tmp_path))
    assert table.header[1] == "differs"
    assert [row[1] for row in table.rows] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    assert table.value_header[-1] == "optimizer.lr"
    assert [row[-1] for row in table.values] == [0.1, 0.2]


def test_differences_name_fields_by_path() -> None:
    first = {"a": {"b": 1, "c": [1]}, "run_dir": "x"}
    second = {"a": {"b": 2, "c": [1]}, "run_dir": "y"}
    assert differences([first, second, {}]) == {"a.b": (1, 2, None)}
    assert differences([first, {}]) == {}


def test_the_json_document_holds_every_record(sweep: Path) -> None:
    document = json.loads(json.dumps(read_report(sweep).to_json(), allow_nan=False))
    assert document["sweep"] is True
    assert [run["record"]["status"] for run in document["runs"]] == ["ok", "failed", "unsupported", "running"]
    assert document["runs"][1]["record"]["loss"] == [None]
    assert document["runs"][1]["differing"] == {"optimizer.lr": 0.2}


def test_a_directory_without_records_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be the directory of a run or of a sweep.*no record.json"):
        report(tmp_path)
    with pytest.raises(RequestError, match="There is no such directory"):
        report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(RequestError, match="must be a run's record"):
        read_report(tmp_path)


def test_the_terminal_shows_narrow_tables_and_whole_reasons(sweep: Path) -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(runs_table(read_report(sweep)))
    text = shown.get()
    assert "1: rank 1 (stage 1, layers 4..7) died: SIGKILL" in text
    assert any(line.split()[:3] == ["0", "lr=0.1", "ok"] for line in text.splitlines())


def test_reading_a_report_imports_neither_torch_nor_matplotlib(sweep: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from runner.report import report\n"
        "report(Path(sys.argv[1]), write=False)\n"
        "assert not {'torch', 'matplotlib', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(sweep)], check=True)
    assert not (sweep / "report").exists()


def test_a_report_of_a_run_says_as_the_run_does_why_times_are_others(tmp_path: Path) -> None:
    others = {"other_work": {"cores": 1.5, "of": 2}}
    _ok().replace(extras=others, peak_memory_bytes={"kind": "tensor_bytes"}).save(tmp_path)
    text = tables(report(tmp_path))["predicted_measured"].markdown()
    assert "- other work had 1.5 of 2 cores meanwhile: on a quiet machine times are shorter than these" in text
