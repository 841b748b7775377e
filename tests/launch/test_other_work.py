"""What a run says of other work on its cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.launch.run import other_work
from runner.launch.run.other_work import CoreTimes, OtherWork
from runner.record import RunRecord
from runner.report.ending import results

TICKS = os.sysconf("SC_CLK_TCK")


def test_the_cores_of_this_process_are_counted_without_what_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns are user, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen, guests twice."""
    stat = tmp_path / "stat"
    rows = [f"cpu{number} {' '.join(str(each * TICKS) for each in range(1, 11))}" for number in (0, 1, 10)]
    stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *rows, "intr 5"]), encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 10})
    found = CoreTimes.now(stat)
    assert found is not None
    assert found.busy == 2 * (1 + 2 + 3 + 6 + 7 + 8)
    assert CoreTimes.now(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("busy", "own", "cores"), [(30.0, 20.0, 1.0), (20.0, 20.0, 0.0), (20.0, 21.0, 0.0), (90.0, 10.0, 4.0)]
)
def test_what_is_not_the_runs_own_is_other_work(
    busy: float, own: float, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([CoreTimes(5.0, 100.0, 7.0), CoreTimes(15.0, 100.0 + busy, 7.0 + own)])
    monkeypatch.setattr(CoreTimes, "now", lambda: next(times))
    monkeypatch.setattr(other_work, "num_cores", lambda: 4)
    assert OtherWork().cores() == (cores, 4)


def test_children_that_have_ended_are_the_runs_own() -> None:
    before = CoreTimes.now()
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = CoreTimes.now()
    assert before is not None
    assert after is not None
    assert after.own - before.own >= 0.29


def test_a_run_on_cores_says_what_others_had() -> None:
    extras = {"run_seconds": {"start": 1.0, "num_steps": 1, "num_counted": 0, "steps": 2.0}}
    record = RunRecord(steps=1, extras=extras, peak_memory_bytes={"kind": "tensor_bytes"})

    def told(cores: float, kind: str = "tensor_bytes") -> list[str]:
        found = record.replace(
            extras=extras | {"other_work": {"cores": cores, "of": 2}}, peak_memory_bytes={"kind": kind}
        )
        return [line for line in results(found) if "other work" in line]

    line = "other work had 1.3 of 2 cores meanwhile: on a quiet machine times are shorter than these"
    assert told(1.26) == [line]
    assert told(0.1) == told(1.26, "cuda_allocated") == []


def test_a_run_says_when_its_rehearsal_had_another_speed() -> None:
    def told(step: float, *, others: float = 0.0, compute: float = 0.142) -> list[str]:
        record = RunRecord(
            step_seconds={"all": [], "median": step, "p10": 0.163, "p90": 0.19, "predicted": 0.136},
            seconds={"compute": compute},
            extras={"rehearsed_compute_seconds": 0.1, "other_work": {"cores": others, "of": 2}},
            peak_memory_bytes={"kind": "tensor_bytes"},
        )
        return [line for line in results(record) if "no other work" in line]

    than = "forwards and backwards took 1.42 times what they took in the rehearsal, steps 163 ms to 190 ms"
    causes = "this machine's own speed has changed, or what a step computes"
    assert told(0.186) == [f"with no other work on these cores, {than}: {causes}"]
    assert told(0.186, compute=0.1) == told(0.186, compute=0.08) == []  # the prediction itself is wrong
    assert told(0.14) == told(0.186, others=1.0) == []
    assert "1.08 times" in told(0.158, compute=0.108)[0]
    assert told(0.158, compute=0.104) == told(0.186, compute=0.108) == []  # too little of it


def test_a_step_that_nothing_explains_is_told_by_its_parts() -> None:
    def told(predicted: float | None) -> list[str]:
        seconds = {"compute": 0.003, "communication": 0.007, "bubble": 0.009, "optimizer": 0.001, "offload": 0.0}
        record = RunRecord(
            step_seconds={"all": [], "median": 0.028, "p10": 0.02, "p90": 0.03, "predicted": predicted},
            seconds=seconds | {"data": 0.002, "callbacks": 0.003, "rest": 0.003},
            extras={"rehearsed_compute_seconds": 0.0025, "other_work": {"cores": 0.0, "of": 2}},
            peak_memory_bytes={"kind": "tensor_bytes"},
        )
        return [line for line in results(record) if line.startswith("a step's")]

    assert told(0.0105) == [
        "a step's 28 ms: forwards and backwards 3 ms (2.5 ms in the rehearsal), messages, waiting and update 17 ms, "
        "data, callbacks and the rest 8 ms (for all of these 8 ms were predicted)"
    ]
    assert told(0.026) == told(None) == []
