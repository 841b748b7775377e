"""Sweeps last: killed and started again, they go on; what is done stays done, and every job keeps its row."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import HERE, Started, wait_for
from light_job import STARTS

from runner.cli.main import main
from runner.config.compose.resolve import fingerprint, resolve
from runner.errors import RequestError
from runner.launch.sweep import jobs as sweep_jobs
from runner.launch.sweep import run as sweeps
from runner.record import RunRecord
from runner.report import read_report
from runner.report.ledger import Job, Ledger, is_running
from runner.report.tables import runs_table

TINY = ("model=mlp", "data.batch_size=8", "logger=none", "trainer.progress=false")


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where sweeps have light jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_jobs, "JOB_MODULE", "light_job")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", ""), str(HERE.parents[1])])
    )
    return tmp_path


def start(*overrides: str) -> int:
    return main(["train", "-m", *TINY, "run_dir=s", *overrides])


def statuses(directory: Path) -> list[str]:
    return [run.record.status for run in read_report(directory / "s").runs]


def starts(directory: Path) -> list[int]:
    """How often each job was started."""
    files = (directory / "s" / run.name / STARTS for run in read_report(directory / "s").runs)
    return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def test_a_ledger_knows_jobs_by_what_they_ask_for() -> None:
    ledger, jobs = Ledger().entered([("a", ["x=1"]), ("b", ["x=2"]), ("b", ["name=c"])])
    assert [job.number for job in jobs] == [0, 1, 2]
    again, found = ledger.entered([("b", ["name=c"]), ("new", ["x=3"]), ("a", ["x=1", "y=0"])])
    assert [job.number for job in found] == [2, 3, 0]
    assert again.jobs[:3] == ledger.jobs
    assert again.jobs[3] == Job(3, "new", ("x=3",))


def test_jobs_of_two_starts_tell_the_overrides_in_which_these_differ(tmp_path: Path) -> None:
    first = ["model=mlp", "trainer.max_steps=10", "run_dir=a"]
    ledger, _ = Ledger().entered([("a", ["seed=1"]), ("b", ["seed=2"])], first)
    assert ledger.told() == {0: ["seed=1"], 1: ["seed=2"]}
    second = ["model=mlp", "trainer.max_steps=20", "data.batch_size=4", "run_dir=./a", "sweep_retry=failed"]
    ledger, _ = ledger.entered([("c", ["seed=1"]), ("d", ["seed=2"])], second)
    ledger, found = ledger.entered([("d", []), ("e", [])], ["model=mlp", "trainer.max_steps=20", "seed=3"])
    ledger.save(tmp_path)
    assert [job.number for job in found] == [3, 4]
    assert Ledger.load(tmp_path).told() == {
        0: ["seed=1", "trainer.max_steps=10"],
        1: ["seed=2", "trainer.max_steps=10"],
        2: ["seed=1", "trainer.max_steps=20", "data.batch_size=4"],
        3: ["seed=2", "trainer.max_steps=20", "data.batch_size=4"],
        4: ["trainer.max_steps=20", "seed=3"],
    }


def test_a_later_start_says_what_it_has_that_earlier_ones_had_not(caplog: pytest.LogCaptureFixture) -> None:
    before, _ = Ledger().entered([("a", ["seed=1"])], ["model=mlp"])
    after, found = before.entered([("b", ["seed=1"])], ["model=mlp", "trainer.max_steps=3"])
    with caplog.at_level("INFO"):
        sweeps._tell_others(before, after, found)
    start = "1 of 1 jobs are new beside the 1 of earlier starts"
    assert caplog.messages == [f"{start}, which had no trainer.max_steps=3; these have trainer.max_steps=3"]


def test_a_ledger_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"jobs": [{"number": 0, "key": "a", "overrides": ["seed=1"]}]}')
    ledger, _ = Ledger.load(tmp_path).entered([("b", ["seed=1"])], ["trainer.max_steps=20"])
    assert ledger.told() == {0: ["seed=1"], 1: ["seed=1"]}


def test_a_ledger_is_read_back(tmp_path: Path) -> None:
    assert Ledger.load(tmp_path) == Ledger()
    ledger, _ = Ledger().entered([("a", ["x=1"]), ("b", [])])
    ledger.save(tmp_path)
    assert Ledger.load(tmp_path) == ledger
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the ledger of a sweep"):
        Ledger.load(tmp_path)


def test_what_becomes_of_failures_changes_no_number() -> None:
    plain = resolve([*TINY])
    assert fingerprint(resolve([*TINY, "sweep_retry=failed", "sweep_on_failure=stop"])) == fingerprint(plain)


@pytest.mark.costly
def test_jobs_killed_in_the_middle_and_started_again(light: Path) -> None:
    rates = "optimizer.lr=1,2,101,15,25,12e-1"
    command = [str(HERE / "light_sweep.py"), "train", "-m", *TINY, "run_dir=s", rates]
    started = Started([sys.executable, *command], light, executed=True)
    wait_for([light / "s" / "2" / STARTS], timeout=1500)
    assert is_running(light / "s")
    assert statuses(light) == ["ok"] * 2 + ["running"] + ["waiting"] * 3
    assert "another process" in _refusal(rates).lower()
    started.process.send_signal(signal.SIGKILL)
    started.finish()
    assert started.left_behind() == []
    assert statuses(light) == ["ok"] * 2 + ["running"] + ["waiting"] * 3
    report = read_report(light / "s")
    assert report.is_cut
    assert "no process runs this sweep any more" in runs_table(report).markdown()

    assert start(rates) == 1
    assert statuses(light) == ["ok"] * 3 + ["failed"] * 2 + ["ok"]
    assert starts(light) == [1] * 2 + [2] + [1] * 3
    reasons = [RunRecord.load(light / "s" / number).reason for number in ("3", "4")]
    assert reasons == ["the job's process ended with SIGSEGV", "the job's process ended with SIGKILL"]
    table = runs_table(read_report(light / "s"))
    assert [row[:3] for row in table.rows][1:3] == [("1", "optimizer.lr=2", "ok"), ("2", "optimizer.lr=101", "ok")]
    assert len(table.rows) == 6
    assert not read_report(light / "s").is_cut


@pytest.mark.costly
def test_the_job_that_was_cut_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """A real one, which ends bit for bit as if nothing had been."""
    plain = [sys.executable, "-m", "runner", "train", *TINY, "trainer.max_steps=100", "checkpoint.every=5"]
    sweep = [*plain, "-m", "seed=5,6", "run_dir=s"]
    started = Started(sweep, tmp_path)
    steps = tmp_path / "s" / "0" / "steps.jsonl"
    wait_for([steps], timeout=1500)
    while len(steps.read_text().splitlines()) < 12:
        time.sleep(0.01)
    started.process.send_signal(signal.SIGKILL)
    started.finish()
    assert started.left_behind() == []
    for words in (sweep, [*plain, "seed=5", "run_dir=r"]):
        status, _, err = Started(words, tmp_path).finish(timeout=1500)
        assert status == 0, err
    records = [RunRecord.load(tmp_path / "s" / str(number)) for number in range(2)]
    assert [record.extras.get("restarts", 0) for record in records] == [1, 0]
    assert RunRecord.load(tmp_path / "r").loss == records[0].loss


def _refusal(rates: str) -> str:
    with pytest.raises(RequestError) as refused:
        sweeps.sweep([[*TINY, "run_dir=s", f"optimizer.lr={rate}"] for rate in (1, 2)], command="runner train -m")
    return str(refused.value)


@pytest.mark.costly
def test_a_failure_may_end_the_sweep_or_not_count_and_is_tried_again_where_that_is_asked_for(light: Path) -> None:
    rates = "optimizer.lr=1,15,2"
    assert start(rates, "sweep_on_failure=stop") == 1
    assert statuses(light) == ["ok", "failed", "waiting"]
    assert start(rates, "sweep_on_failure=ignore") == 0
    assert statuses(light) == ["ok", "failed", "ok"]
    assert starts(light) == [1, 1, 1]
    assert start(rates, "sweep_retry=failed") == 1
    assert starts(light) == [1, 2, 1]


@pytest.mark.costly
def test_a_sweep_grows_by_further_jobs(light: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is written once in a start, not once for each job."""
    saved: list[int] = []
    save = Ledger.save

    def noted(ledger: Ledger, place: Path) -> None:
        saved.append(len(ledger.jobs))
        save(ledger, place)

    monkeypatch.setattr(Ledger, "save", noted)
    assert start("optimizer.lr=1,2") == 0
    assert start("optimizer.lr=2,3,nonsense") == 0
    assert starts(light) == [1, 1, 1, 0]
    assert saved == [2, 4]
    assert statuses(light) == ["ok", "ok", "ok", "unsupported"]
    assert main(["report", "s", "--json"]) == 0


def test_a_study_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", *TINY, "hydra/sweeper=ax", "seed=choice(0,1)"]) == 2
    assert "hydra/sweeper = ax: must be optuna. Try hydra/sweeper=optuna." in capsys.readouterr().err
    assert main(["train", "-m", *TINY, "hydra/sweeper=optuna", "hydra.sweeper.trials=3", "seed=choice(0,1)"]) == 2
    assert "hydra.sweeper.trials = 3: is no setting." in capsys.readouterr().err
    assert main(["train", "-m", *TINY, "hydra/sweeper=optuna", "optimzer.lr=1"]) == 2
    assert "Try optimizer.lr=1." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_policies_of_sweeps_are_refused_where_there_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "sweep_retry=failed", "sweep_on_failure=stop"]) == 2
    told = capsys.readouterr().err
    assert "sweep_retry = failed: belongs to a sweep." in told
    assert "sweep_on_failure = stop: belongs to a sweep." in told
    assert main(["train", "-m", *TINY, "seed=0,1", "sweep_retry=fialed"]) == 2
    assert "Try sweep_retry=failed." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
