"""As :mod:`test_resume`, in new processes and in every layout."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from covering import sampled
from resume_runs import ROOT, assert_same_run, command, record_of, train
from resume_zoo import OVERRIDES

from runner.checkpoint.file import read_checkpoint
from runner.record import read_steps

pytestmark = pytest.mark.slow

LAYOUTS = {
    "single": [],
    "gpipe": ["schedule=gpipe", "parallelism.pipeline=2"],
    "1f1b": ["schedule=1f1b", "parallelism.pipeline=2", "data.workers=2"],
    "interleaved": ["schedule=interleaved_1f1b", "parallelism.pipeline=2"],
    "pipefisher": ["schedule=pipefisher", "parallelism.pipeline=2", "optimizer=kfac", "cost.B=3"],
    "zb_v": ["schedule=zb_v", "parallelism.pipeline=2"],
    "pipeline x data": ["schedule=1f1b", "parallelism.pipeline=2", "parallelism.data=2"],
}


_BITS = [
    "optimizer=onebit_adam",
    "optimizer.freeze_step=4",
    "parallelism.pipeline=2",
    "parallelism.data=2",
    "trainer.grad_clip_norm=null",
]


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}.ckpt"


CUTS = (1, 4, 6, 9, 13)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", sampled(LAYOUTS, "zb_v", "pipeline x data"))
def test_every_layout_goes_on_in_new_processes(layout: str, tmp_path: Path) -> None:
    goes_on(layout, tmp_path, CUTS[1:4:2] if layout == "1f1b" else (9,))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_five_cuts(layout: str, tmp_path: Path) -> None:
    goes_on(layout, tmp_path, CUTS)


def goes_on(layout: str, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    assert ROOT.is_dir()
    whole = tmp_path / "whole"
    done = train(whole, *LAYOUTS[layout])
    assert done.returncode == 0, done.stderr
    for step in cuts:
        done = train(tmp_path / f"from_{step}", *LAYOUTS[layout], f"resume={checkpoint(whole, step)}")
        assert done.returncode == 0, done.stderr
        assert_same_run(whole, tmp_path / f"from_{step}")


@pytest.mark.timeout(600)
def test_every_replica_goes_on_with_its_own_running_statistics(tmp_path: Path) -> None:
    """Validation uses each replica's, so that its loss shows them."""
    few = ["schedule.microbatches=1", "trainer.max_steps=8"]  # batch norm needs two samples
    request = [*LAYOUTS["pipeline x data"], "model.target=resume_zoo:normed", *few]
    whole = tmp_path / "whole"
    assert train(whole, *request).returncode == 0
    saved = read_checkpoint(checkpoint(whole, 3))
    (first, second) = (saved["state_dict"], saved["replica_buffers"][1])
    assert {name.split(".")[-1] for name in second} == {"running_mean", "running_var", "num_batches_tracked"}
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    done = train(tmp_path / "resumed", *request, f"resume={checkpoint(whole, 3)}")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, tmp_path / "resumed")
    ours, theirs = (read_checkpoint(checkpoint(place, 8)) for place in (tmp_path / "resumed", whole))
    expected = theirs["replica_buffers"][1]
    assert [name for name in expected if not torch.equal(ours["replica_buffers"][1][name], expected[name])] == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_what_compression_left_over_goes_on(asynchronous: str, tmp_path: Path) -> None:
    """Each rank's own, in a whole file as in parts; with one replica the mean is taken."""
    request = [*_BITS, f"checkpoint.asynchronous={asynchronous}"]
    whole = tmp_path / "whole"
    assert train(whole, *request).returncode == 0
    left = read_checkpoint(checkpoint(whole, 6))["optimizer_states"][0]["compression_errors"]
    assert sorted(left) == [0, 1, 2, 3]
    assert float(left[3]["worker"].abs().sum()) > 0
    done = train(tmp_path / "resumed", *request, f"resume={checkpoint(whole, 6)}")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, tmp_path / "resumed")
    done = train(tmp_path / "fewer", *request, "parallelism.data=1", f"resume={checkpoint(whole, 6)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_layout_may_change_and_change_back(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert train(whole, *LAYOUTS["1f1b"]).returncode == 0
    single = tmp_path / "single"
    total = ["trainer.max_steps=9", "lr_scheduler.total_steps=14"]
    done = train(single, f"resume={checkpoint(whole, 3)}", *total)
    assert done.returncode == 0, done.stderr
    assert "changed since then: parallelism.pipeline = 1, was 2" in done.stderr
    back = tmp_path / "back"
    done = train(back, *LAYOUTS["gpipe"], f"resume={checkpoint(single, 9)}", "lr_scheduler.total_steps=14")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, back)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_schedule_may_change_and_with_it_who_holds_what(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert train(whole, *LAYOUTS["zb_v"]).returncode == 0
    first = tmp_path / "first"
    straight = ["schedule=1f1b", "parallelism.pipeline=2"]
    done = train(first, *straight, "trainer.max_steps=9", "lr_scheduler.total_steps=14")
    assert done.returncode == 0, done.stderr
    then = tmp_path / "then"
    done = train(then, *LAYOUTS["zb_v"], f"resume={checkpoint(first, 9)}", "lr_scheduler.total_steps=14")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, then)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_run_is_started_again_by_the_same_command(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    again = [*LAYOUTS["gpipe"], "resume=auto", "trainer.max_steps=60", "checkpoint.every=2", "checkpoint.keep=2"]
    assert train(whole, *again).returncode == 0
    line, environment = command("train", *OVERRIDES, f"run_dir={killed}", *again)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(line, env=environment, cwd=tmp_path, stderr=quiet, stdout=quiet)
    end = time.monotonic() + 200
    while len(read_steps(killed)) < 7:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert record_of(killed)["status"] == "running"
    done = train(killed, *again)
    assert done.returncode == 0, done.stderr
    assert "continuing after step" in done.stderr
    assert_same_run(whole, killed)
