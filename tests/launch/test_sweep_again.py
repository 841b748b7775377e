"""Sweeps last: killed and started again, they go on; what is done stays done, and every job keeps its row."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from launch_helpers import HERE, Started, wait_for
from light_job import STARTS
from rich.console import Console

from runner.cli.main import main
from runner.config.compose.resolve import fingerprint, resolve
from runner.errors import RequestError
from runner.launch.run.directory import job_directory
from runner.launch.sweep import jobs as sweep_jobs
from runner.launch.sweep import run as sweeps
from runner.launch.sweep.live import in_place
from runner.record import RunRecord, StepLog
from runner.report import read_report
from runner.report.ledger import Job, Ledger, is_running, running
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


@pytest.mark.slow
def test_twelve_jobs_killed_in_the_middle_and_started_again(light: Path) -> None:
    rates = "optimizer.lr=1,2,3,4,5,101,7,8,9,15,25,12e-1"
    command = [str(HERE / "light_sweep.py"), "train", "-m", *TINY, "run_dir=s", rates]
    started = Started([sys.executable, *command], light, executed=True)
    wait_for([light / "s" / "5" / STARTS], timeout=200)
    assert is_running(light / "s")
    assert statuses(light) == ["ok"] * 5 + ["running"] + ["waiting"] * 6
    assert "another process" in _refusal(rates).lower()
    started.process.send_signal(signal.SIGKILL)
    started.finish()
    assert started.left_behind() == []
    assert statuses(light) == ["ok"] * 5 + ["running"] + ["waiting"] * 6
    report = read_report(light / "s")
    assert report.is_cut
    assert "no process runs this sweep any more" in runs_table(report).markdown()

    assert start(rates) == 1
    assert statuses(light) == ["ok"] * 9 + ["failed"] * 2 + ["ok"]
    assert starts(light) == [1] * 5 + [2] + [1] * 6
    reasons = [RunRecord.load(light / "s" / number).reason for number in ("9", "10")]
    assert reasons == ["the job's process ended with SIGSEGV", "the job's process ended with SIGKILL"]
    table = runs_table(read_report(light / "s"))
    assert [row[:3] for row in table.rows][4:6] == [("4", "optimizer.lr=5", "ok"), ("5", "optimizer.lr=101", "ok")]
    assert len(table.rows) == 12
    assert not read_report(light / "s").is_cut


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twelve_runs_killed_in_the_middle_and_started_again(tmp_path: Path) -> None:
    """Real jobs: the one that was cut goes on from its checkpoint, and ends bit for bit as if nothing had been."""
    words = ("trainer.max_steps=100", "checkpoint.every=5")
    plain = [sys.executable, "-m", "runner", "train", "model=mlp", "logger=none", "data.batch_size=8", *words]
    command = [*plain, "-m", "seed=range(12)", "run_dir=s"]
    started = Started(command, tmp_path)
    steps = tmp_path / "s" / "5" / "steps.jsonl"
    wait_for([steps], timeout=900)
    while len(steps.read_text().splitlines()) < 12:
        time.sleep(0.01)
    started.process.send_signal(signal.SIGKILL)
    started.finish()
    assert started.left_behind() == []
    assert statuses(tmp_path) == ["ok"] * 5 + ["running"] + ["waiting"] * 6
    status, _, err = Started(command, tmp_path).finish(timeout=1500)
    assert status == 0, err
    records = [RunRecord.load(tmp_path / "s" / str(number)) for number in range(12)]
    assert [record.status for record in records] == ["ok"] * 12
    assert [record.extras.get("restarts", 0) for record in records] == [0] * 5 + [1] + [0] * 6
    status, _, err = Started([*plain, "seed=5", "run_dir=r"], tmp_path).finish(timeout=100)
    assert status == 0, err
    assert RunRecord.load(tmp_path / "r").loss == records[5].loss


def _refusal(rates: str) -> str:
    with pytest.raises(RequestError) as refused:
        sweeps.sweep([[*TINY, "run_dir=s", f"optimizer.lr={rate}"] for rate in (1, 2)], command="runner train -m")
    return str(refused.value)


@pytest.mark.slow
def test_failed_jobs_are_tried_again_where_that_is_asked_for(light: Path) -> None:
    for _ in range(2):
        assert start("optimizer.lr=1,15") == 1
        assert starts(light) == [1, 1]
    assert start("optimizer.lr=1,15", "sweep_retry=failed") == 1
    assert starts(light) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "status", "last"), [("continue", 1, "ok"), ("stop", 1, "waiting"), ("ignore", 0, "ok")]
)
def test_a_failure_may_end_the_sweep_or_not_count(light: Path, policy: str, status: int, last: str) -> None:
    assert start("optimizer.lr=1,15,2", f"sweep_on_failure={policy}") == status
    assert statuses(light) == ["ok", "failed", last]


@pytest.mark.slow
def test_a_sweep_grows_by_further_jobs(light: Path) -> None:
    assert start("optimizer.lr=1,2") == 0
    assert start("optimizer.lr=2,3,nonsense") == 0
    assert starts(light) == [1, 1, 1, 0]
    assert statuses(light) == ["ok", "ok", "ok", "unsupported"]
    assert main(["report", "s", "--json"]) == 0


@pytest.mark.slow
def test_a_study_by_optuna_is_a_sweep_that_goes_on(light: Path) -> None:
    """A light job's loss is its rate: the sampler is told, and a second start runs no trial again."""
    words = (
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=3",
        "hydra.sweeper.n_jobs=2", "optimizer.lr=interval(0.1,0.9)", "seed=choice(0,1)",
    )  # fmt: skip
    for _ in range(2):
        assert start(*words) == 0
        assert statuses(light) == ["ok"] * 4
        assert starts(light) == [1] * 4
    best = yaml.safe_load((light / "s" / "optimization_results.yaml").read_text())
    losses = [run.loss for run in read_report(light / "s").runs]
    assert best["best_value"] == min(loss for loss in losses if loss is not None)
    assert all("optimizer.lr=0." in " ".join(run.record.extras["overrides"]) for run in read_report(light / "s").runs)


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


def test_a_terminal_shows_the_table_while_the_sweep_runs(tmp_path: Path) -> None:
    RunRecord(extras={"overrides": ["seed=0"]}).save(job_directory(tmp_path, 0))
    with StepLog(tmp_path / "0") as log:
        log.write(step=1, loss=0.5, seconds=0.25)
    Ledger().entered([("a", ["seed=0"]), ("b", ["seed=1"])])[0].save(tmp_path)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with running(tmp_path), in_place(lambda: read_report(tmp_path), console):
        time.sleep(0.1)
    assert "running" in shown.getvalue()
    assert "250 ms" in shown.getvalue()
    assert "waiting" in shown.getvalue()


def test_the_ledger_and_a_steps_line_cost_next_to_nothing(tmp_path: Path) -> None:
    """Less than 1 % of a step of 50 ms: the line of a step is all that is written per step."""

    def seconds(act: Callable[[], object], times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            act()
        return (time.process_time() - start) / times

    ledger, _ = Ledger().entered([(f"{number:064}", [f"optimizer.lr={number}"]) for number in range(100)])
    with StepLog(tmp_path) as log:
        line = seconds(lambda: log.write(step=1, loss=1 / 3, seconds=0.05), 200)
    assert line < 0.01 * 0.05
    assert seconds(lambda: ledger.save(tmp_path), 5) < 0.05  # once in a sweep of a hundred jobs, not once per step
    assert len(json.loads((tmp_path / "sweep.json").read_text())["jobs"]) == 100
