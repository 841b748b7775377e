"""One command starts its ranks, and whichever way they end, it says so and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launch_helpers import OVERRIDES, Started, command, wait_for

from runner.plan.values import RunPlan
from runner.record import RunRecord

PIPELINE = (*OVERRIDES, "parallelism.pipeline=2", "partition=uniform", "run_dir=run", "device=cpu")
PATIENCE_SECONDS = 90.0  # less than the 120 s for which ranks that are told to stop, and do not, are waited for


def _finish(
    directory: Path, entry: str, *overrides: str, action: str = "train", executed: bool = False
) -> tuple[int, str, str]:
    started = Started(command(action, *overrides, entry=entry), directory, executed=executed)
    result = started.finish()
    assert started.left_behind() == []
    return result


@pytest.mark.costly
def test_ranks_meet_and_the_record_says_ok(tmp_path: Path) -> None:
    status, out, err = _finish(tmp_path, "succeed", *PIPELINE, executed=True)
    assert status == 0, err
    assert (tmp_path / "run" / "total.txt").read_text() == "3.0"  # 1 + 2, reduced over both ranks
    assert (tmp_path / "run" / "threads.txt").read_text() == "1"
    assert "hello from rank 1" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert "hello from rank 1" not in out
    assert "predicted | measured" in out
    assert RunRecord.load(tmp_path / "run").status == "ok"
    assert len(RunPlan.load(tmp_path / "run").profile.layers) == 8


def test_an_exception_in_one_rank_names_it_its_stage_and_the_reason(tmp_path: Path) -> None:
    status, _, err = _finish(tmp_path, "last_rank_raises", *PIPELINE, "seed=7")
    assert status == 1
    first = err.splitlines()[-1]
    assert first.startswith("rank 1 (stage 1, layers 4..7) failed: ValueError: the user's model is broken")
    assert "fake_entries.py" in first
    assert "Traceback" not in err
    log = tmp_path / "run" / "logs" / "rank_1.log"
    assert str(log) in first
    assert "second line" in log.read_text()
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.reason) == ("failed", first)
    _holds_request_machine_and_prediction(record, tmp_path / "run")


def _holds_request_machine_and_prediction(record: RunRecord, run_dir: Path) -> None:
    """What was known before the first step."""
    assert str(record.command).startswith("runner train model=mlp")
    assert record.config["seed"] == 7
    assert record.config["run_dir"] == str(run_dir)
    assert len(str(record.fingerprint)) == 64
    assert record.layout == {"pipeline": 2, "data": 1, "tensor": 1, "world_size": 2}
    assert len(record.peak_memory_bytes["predicted"]) == 2
    assert record.step_seconds["predicted"] > 0
    assert 0 <= record.bubble_ratio["predicted"] < 1
    assert record.extras["seconds_source"] in ("measured", "estimated")
    assert record.hardware["cores"] >= 1


def test_a_wrong_request_that_only_a_rank_could_see(tmp_path: Path) -> None:
    status, _, err = _finish(tmp_path, "last_rank_refuses", *PIPELINE, action="ranks")
    assert status == 2
    assert "data.batch_size = 3: must be even. Try data.batch_size=4." in err.splitlines()
    assert "Traceback" not in err
    assert "rank 0" not in err  # it only lost its peer
    assert RunRecord.load(tmp_path / "run").status == "unsupported"


def test_out_of_memory_has_its_own_status(tmp_path: Path) -> None:
    status, _, err = _finish(tmp_path, "last_rank_is_out_of_memory", *PIPELINE, action="ranks")
    assert status == 3
    assert "rank 1 (stage 1, layers 4..7) failed" in err
    assert RunRecord.load(tmp_path / "run").status == "out_of_memory"


def test_a_wrong_request_writes_nothing(tmp_path: Path) -> None:
    status, _, err = _finish(tmp_path, "succeed", *OVERRIDES, "parallelism.pipeline=99")
    assert status == 2
    assert "Traceback" not in err
    assert "pipeline" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_what_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    status, _, err = _finish(tmp_path, "succeed", *PIPELINE, "memory_limit=1000")
    assert status == 3
    assert "Traceback" not in err
    assert "memory_limit" in err
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """Also where the others do not answer to SIGTERM, as inside a collective."""
    started = Started(command("train", *PIPELINE, entry="step_forever"), tmp_path)
    run = tmp_path / "run"
    wait_for([run / "pid_0", run / "pid_1", run / "steps.jsonl"])
    os.kill(int((run / "pid_1").read_text()), signal.SIGKILL)
    status, _, err = started.finish(timeout=PATIENCE_SECONDS)
    assert status == 1
    assert started.left_behind() == []
    assert "rank 1 (stage 1, layers 4..7) died: SIGKILL" in err.splitlines()
    record = RunRecord.load(run)
    assert (record.status, record.reason) == ("failed", "rank 1 (stage 1, layers 4..7) died: SIGKILL")
    assert record.steps == len(record.loss) >= 1
    assert record.loss[0] == 1.0


@pytest.mark.parametrize(("number", "action"), [(signal.SIGINT, "train"), (signal.SIGTERM, "ranks")])
def test_being_told_to_stop_is_clean(tmp_path: Path, number: signal.Signals, action: str) -> None:
    started = Started(command(action, *PIPELINE, entry="step_until_told"), tmp_path)
    run = tmp_path / "run"
    wait_for([run / "pid_0", run / "pid_1"])
    started.process.send_signal(number)
    status, _, err = started.finish()
    told = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (75, "preempted")}
    assert (status, RunRecord.load(run).status) == told[number]
    assert started.left_behind() == []
    assert "Traceback" not in err
    assert f"stopped by {number.name}" in err


def test_a_second_ctrl_c_does_not_wait_for_ranks_that_hang(tmp_path: Path) -> None:
    started = Started(command("ranks", *PIPELINE, entry="step_forever"), tmp_path)
    run = tmp_path / "run"
    wait_for([run / "pid_0", run / "pid_1"])
    for _ in range(2):
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    status, _, _ = started.finish(timeout=PATIENCE_SECONDS)
    assert status == 130
    assert started.left_behind() == []


@pytest.mark.costly
def test_no_rank_outlives_a_killed_command(tmp_path: Path) -> None:
    started = Started(command("ranks", *PIPELINE, entry="step_forever"), tmp_path, executed=True)
    run = tmp_path / "run"
    wait_for([run / "pid_0", run / "pid_1"])
    started.process.kill()
    started.process.communicate()
    assert started.left_behind() == []
