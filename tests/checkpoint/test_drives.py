"""Files of a drive: a killed run goes on bit by bit, and a full drive or a lost folder is told in one line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from resume_runs import assert_same_run, record_of, train

from runner.launch.needs.zero import has_libaio

STEPS, EVERY = 5, 2
FOURTH_STEP = 3 * 3 + 2  # a forward of the fourth step; a step has three micro-batches
MOVED = {
    "weights": ("offload=weights_granular", "offload.fraction=1.0", "offload.drive={}"),
    "activations": ("offload=activations_async", "offload.drive={}"),
    "states": ("offload=nvme", "offload.nvme_path={}"),
}
# DeepSpeed swaps no less than a MiB, and adds up a norm of offloaded gradients in another order.
ZERO = ("parallelism.data=2", "zero.stage=3", "+model.kwargs.width=1024", "trainer.grad_clip_norm=null")
LAYOUT = {kind: ZERO if kind == "states" else ("+model.kwargs.width=64",) for kind in MOVED}
GONE = "is gone|No such file or directory"  # found by a write to a file, or by the making of the next one
NO_ROOM = "No space left on device"
pytestmark = pytest.mark.timeout(1800)  # DeepSpeed compiles its operators at their first use
STATES = pytest.param(
    "states", marks=pytest.mark.skipif(not has_libaio(), reason="offload to a drive needs libaio-dev")
)


def request(kind: str, drive: Path | None = None, how: str = "") -> list[str]:
    """The overrides of a run; without a drive, of one that keeps on the device what the others move."""
    act = (f"+model.kwargs.how={how}", f"+model.kwargs.at={FOURTH_STEP}", f"+model.kwargs.folder={drive}")
    moved = [word.format(drive) for word in MOVED[kind]] if drive is not None else []
    return [
        "model.target=driven:model", *LAYOUT[kind], f"trainer.max_steps={STEPS}",
        f"checkpoint.every={EVERY}", *moved, *(act if how else ()),
    ]  # fmt: skip


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than what the runs move."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["weights", STATES])
def test_a_killed_run_goes_on_bit_by_bit(tmp_path: Path, kind: str) -> None:
    whole, broken, drive = tmp_path / "whole", tmp_path / "broken", tmp_path / "drive"
    drive.mkdir()
    done = train(whole, *request(kind))
    assert done.returncode == 0, done.stderr
    again = ("resume=auto", "launcher.max_restarts=1")
    done = train(broken, *request(kind, drive, "kill"), *again)
    assert done.returncode == 0, done.stderr
    assert "died: SIGKILL" in done.stderr
    record = record_of(broken)
    assert record["restarts"] == 1
    assert_same_run(whole, broken)
    assert list(drive.iterdir()) == []
    peak = record["peak_memory_bytes"]
    assert all(found <= said for said, found in zip(peak["predicted"], peak["measured"], strict=True))


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["activations"])
def test_a_lost_folder_and_a_full_drive_end_the_run_and_leave_the_checkpoint(
    tmp_path: Path, small_drive: Path, kind: str
) -> None:
    whole, run, drive = tmp_path / "whole", tmp_path / "run", tmp_path / "drive"
    drive.mkdir()
    done = train(whole, *request(kind))
    assert done.returncode == 0, done.stderr
    done = train(run, *request(kind, drive, "remove"))
    ended_in_one_line(done, run, GONE)
    done = train(run, *request(kind, small_drive), "resume=auto")
    ended_in_one_line(done, run, NO_ROOM)
    drive.mkdir()
    done = train(run, *request(kind, drive), "resume=auto")
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, run)


def ended_in_one_line(done: subprocess.CompletedProcess[str], run: Path, words: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    told = [line.split(" (")[0] for line in done.stderr.splitlines() if re.search(words, line)]
    assert sorted(told) in (["rank 0"], ["rank 1"], ["rank 0", "rank 1"]), done.stderr  # both may have lost a file
    record = record_of(run)
    assert record["status"] == "failed"
    assert re.search(words, record["reason"])
