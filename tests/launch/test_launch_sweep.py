"""A sweep: one job after another, one row each, whatever becomes of a job."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launch_helpers import OVERRIDES, Started, command, wait_for

from runner.launch.sweep.run import distinguishing, sweep
from runner.record import RunRecord


def test_overrides_that_tell_jobs_apart() -> None:
    lists = [["model=mlp", "optimizer.lr=1", "seed=0"], ["model=mlp", "optimizer.lr=2", "seed=0"]]
    assert distinguishing(lists) == [["optimizer.lr=1"], ["optimizer.lr=2"]]
    assert distinguishing([["seed=0"]]) == [[]]


@pytest.mark.costly
def test_a_crash_is_a_row_and_stops_nothing(tmp_path: Path) -> None:
    """A job that is left out is a row, too, with the reason."""
    cells = ("seed=0,1", "optimizer.lr=2,0.5", "sweep_without=['seed=1 optimizer.lr=2: Asked already']")
    started = Started(command("sweep", *OVERRIDES, "run_dir=s", *cells, entry="crash_where_lr_is_large"), tmp_path)
    status, out, err = started.finish()
    assert started.left_behind() == []
    assert status == 1, err
    records = [RunRecord.load(tmp_path / "s" / str(number)) for number in range(4)]
    assert [record.status for record in records] == ["failed", "ok", "unsupported", "ok"]
    assert records[0].reason == "rank 0 (stage 0, layers 0..7) died: SIGSEGV"
    assert records[0].extras["overrides"] == ["seed=0", "optimizer.lr=2"]
    assert "leaves this job out. Asked already." in str(records[2].reason)
    assert records[2].config["optimizer"]["lr"] == 2.0  # so that a table has a place for it
    assert not (tmp_path / "s" / "2" / "config.yaml").exists()
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "seed=0", "lr=2", "failed", "-", "-"] in [row[:6] for row in rows]
    assert ["1", "*", "seed=0", "lr=0.5", "ok", "0.5", "100", "ms"] in [row[:8] for row in rows]
    assert "0: rank 0 (stage 0, layers 0..7) died: SIGSEGV" in out


@pytest.mark.costly
def test_unsupported_jobs_are_no_failure(tmp_path: Path) -> None:
    """One that no configuration can say, and one that the plan refuses."""
    wanted = ("schedule=gpipe,nonsense", "parallelism.pipeline=1,99")
    started = Started(command("sweep", *OVERRIDES, "run_dir=s", *wanted, entry="crash_where_lr_is_large"), tmp_path)
    status, out, err = started.finish()
    assert status == 0, err
    records = [RunRecord.load(tmp_path / "s" / str(number)) for number in range(4)]
    assert [record.status for record in records] == ["ok", "unsupported", "unsupported", "unsupported"]
    told = err.index("2 of 4 jobs cannot be run: schedule = nonsense: there is no such option.")
    assert told < err.index("job 0, 1 of 4 to run")
    assert "99" in str(records[1].reason)
    assert "nonsense" in str(records[2].reason)
    assert out.count("unsupported") == 3
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("entry", "how"), [("step_until_told", "before it could save"), ("save_when_told", "saved after step 7")]
)
def test_ctrl_c_ends_the_job_and_the_sweep(entry: str, how: str, tmp_path: Path) -> None:
    started = Started(command("sweep", *OVERRIDES, "run_dir=s", "optimizer.lr=0.1,0.2", entry=entry), tmp_path)
    wait_for([tmp_path / "s" / "0" / "pid_0"])
    started.process.send_signal(signal.SIGINT)
    status, out, err = started.finish()
    assert status == 130
    assert started.left_behind() == []
    record = RunRecord.load(tmp_path / "s" / "0")
    assert (record.status, record.reason) == (
        "interrupted",
        f"stopped by SIGINT (Ctrl-C), {how}; resume=auto continues",
    )
    assert not (tmp_path / "s" / "1").exists()
    assert "interrupted" in out
    assert "Traceback" not in err


def test_where_every_job_is_wrong_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.errors import RequestError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="optimzer"):
        sweep([["model=mlp", "optimzer.lr=1"], ["model=mlp", "optimzer.lr=2"]], command="runner train -m")
    assert list(tmp_path.iterdir()) == []
