"""The record: what is written is what is read, whole, and nothing is lost with a killed rank."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.record import (
    RunRecord,
    StepLog,
    environment,
    finish_failed,
    read_steps,
    step_seconds,
    write_atomically,
)

CONTRACT = {
    "status": None,
    "reason": None,
    "command": None,
    "config": None,
    "fingerprint": None,
    "layout": None,
    "versions": None,
    "hardware": None,
    "commit": None,
    "steps": None,
    "loss": None,
    "val_loss": None,
    "step_seconds": {"all", "median", "p10", "p90"},
    "samples_per_second": None,
    "bubble_ratio": {"predicted", "measured"},
    "seconds": {"data", "compute", "communication", "bubble", "optimizer", "offload", "callbacks", "rest"},
    "flops_per_step": None,
    "mfu": None,
    "bytes_moved": {
        *("activations", "activation_gradients", "weights", "weight_gradients", "optimizer_states"),
        *("tensor", "host_activations", "host_weights", "host_weight_gradients"),
    },
    "peak_memory_bytes": {"predicted", "measured", "kind"},
    "artifacts": None,
}


def test_an_empty_record_has_the_contracts_keys_and_no_others(tmp_path: Path) -> None:
    RunRecord().save(tmp_path)
    document = json.loads((tmp_path / "record.json").read_text())
    assert set(document) == set(CONTRACT)
    for key, inner in CONTRACT.items():
        if inner is not None:
            assert set(document[key]) == inner


def test_round_trip_keeps_every_bit_and_every_extra(tmp_path: Path) -> None:
    record = RunRecord(
        status="ok",
        steps=3,
        loss=[0.1 + 0.2, 1 / 3, 5e-324],
        val_loss=[[3, math.pi]],
        step_seconds=step_seconds([0.1, 0.2, 0.4], predicted=0.25),
        layout={"pipeline": 2, "data": 1, "tensor": 1, "world_size": 2},
        extras={"tokens_per_second": 1e9 / 7, "seconds_source": "measured"},
    )
    record.save(tmp_path)
    assert RunRecord.load(tmp_path) == record
    assert json.loads((tmp_path / "record.json").read_text())["tokens_per_second"] == 1e9 / 7


def test_numbers_that_json_has_not_come_back_and_the_file_stays_json(tmp_path: Path) -> None:
    RunRecord(loss=[1.0, math.nan, math.inf], extras={"norm": -math.inf}).save(tmp_path)

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    document = json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)
    assert document["loss"] == [1.0, None, None]
    assert document["norm"] is None
    assert [["loss", 1], "nan"] in document["non_finite"]
    loaded = RunRecord.load(tmp_path)
    assert math.isnan(loaded.loss[1])
    assert loaded.loss[2] == math.inf
    assert loaded.extras == {"norm": -math.inf}


def test_extras_may_not_shadow_a_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps"):
        RunRecord(extras={"steps": 3}).save(tmp_path)


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not the record of a run"):
        RunRecord.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]


def test_readers_never_see_half_a_record(tmp_path: Path) -> None:
    """One process rewrites a large record as fast as it can while this one reads it."""
    program = (
        "import sys; from pathlib import Path; from runner.record import RunRecord\n"
        "for n in range(20): RunRecord(steps=20000, loss=[float(n)] * 20000).save(Path(sys.argv[1]))"
    )
    RunRecord(steps=20000, loss=[0.0] * 20000).save(tmp_path)
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    seen = set()
    while writer.poll() is None:
        loss = RunRecord.load(tmp_path).loss
        assert len(loss) == 20000
        assert len(set(loss)) == 1
        seen.add(loss[0])
    assert writer.returncode == 0
    assert len(seen) > 1


def test_percentiles_interpolate_and_ignore_what_is_not_finite() -> None:
    summary = step_seconds([3.0, 1.0, 2.0, 4.0, 5.0, math.nan])
    assert (summary["median"], summary["p10"], summary["p90"]) == (3.0, 1.4, 4.6)
    assert len(summary["all"]) == 6
    assert step_seconds([]) == {"all": [], "median": None, "p10": None, "p90": None}


def test_every_line_of_the_step_log_is_on_disk_at_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.write(step=1, loss=math.nan, seconds=0.5, bubble=0.1)
    (line,) = read_steps(tmp_path)
    assert math.isnan(line.pop("loss"))
    assert line == {"step": 1, "seconds": 0.5, "bubble": 0.1}
    log.close()


def test_a_step_log_that_continues_cuts_later_steps(tmp_path: Path) -> None:
    with StepLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step=step, loss=float(step), seconds=1.0)
    with StepLog(tmp_path, start_step=2) as log:
        log.write(step=3, loss=30.0, seconds=1.0)
    assert [(one["step"], one["loss"]) for one in read_steps(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_record_of_a_killed_run_is_rebuilt_from_its_steps(tmp_path: Path) -> None:
    RunRecord(status="running", command="runner train", step_seconds=step_seconds([], predicted=2.0)).save(tmp_path)
    with StepLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step=step, loss=1.0 / step, seconds=float(step))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by SIGKILL
    finish_failed(tmp_path, "failed", "rank 1 died: SIGKILL")
    record = RunRecord.load(tmp_path)
    assert (record.status, record.reason, record.command) == ("failed", "rank 1 died: SIGKILL", "runner train")
    assert record.steps == 3
    assert record.loss == [1.0, 1 / 2, 1 / 3]
    assert record.step_seconds == step_seconds([1.0, 2.0, 3.0], predicted=2.0)


def test_a_run_that_never_wrote_a_record_gets_one(tmp_path: Path) -> None:
    finish_failed(tmp_path, "out_of_memory", "too large", command="runner train")
    record = RunRecord.load(tmp_path)
    assert (record.status, record.reason, record.command) == ("out_of_memory", "too large", "runner train")


def test_the_environment_is_told_without_heavy_imports() -> None:
    program = (
        "import sys, json; from runner.record import environment; found = environment()\n"
        "assert not {'torch', 'lightning', 'hydra'} & set(sys.modules); print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found) == {"versions", "hardware", "commit"}
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"] is not None
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1e6


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["commit"] is None
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert environment()["commit"] == head
