"""A checkpoint that cannot be read now may be good: it is neither passed over nor deleted."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_runs import record_of, run_here

from runner.checkpoint.file import newest_good_checkpoint, write_checkpoint
from runner.checkpoint.parts import write_part
from runner.errors import RunFailedError

RUN = ("model.target=resume_zoo:model", "trainer.max_steps=4", "checkpoint.every=2", "checkpoint.keep=9")


def whole(directory: Path, step: int) -> Path:
    path = directory / f"step-{step}.ckpt"
    write_checkpoint({"state_dict": {"w": torch.full((300,), float(step))}, "global_step": step}, path)
    return path


def in_parts(directory: Path, step: int) -> Path:
    path = directory / f"step-{step}.ckpt"
    for rank in range(2):
        write_part({"state_dict": {f"{rank}.w": torch.ones(300)}, "global_step": step}, path, rank, 2)
    return path


class FailingFile(io.FileIO):
    """A file whose reads fail after its first bytes."""

    error = errno.EIO
    good_bytes = 64

    def readinto(self, buffer: Any) -> int:
        if self.tell() + len(memoryview(buffer)) > self.good_bytes:
            raise OSError(self.error, os.strerror(self.error))
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        raise OSError(self.error, os.strerror(self.error))


def _let_fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, good_bytes: int | None) -> None:
    """Files with ``name`` in their path cannot be opened, or not be read beyond their first bytes."""
    opened = io.open

    def failing(file: Any, *arguments: Any, **named: Any) -> Any:
        if name not in str(file):
            return opened(file, *arguments, **named)
        if good_bytes is None:
            raise OSError(number, os.strerror(number), str(file))
        raw = FailingFile(str(file))
        raw.error, raw.good_bytes = number, good_bytes
        return io.BufferedReader(raw, 16)

    monkeypatch.setattr(io, "open", failing)


@pytest.mark.parametrize("good_bytes", [None, 0, 64])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("write", [whole, in_parts])
def test_the_newest_is_not_passed_over_because_it_cannot_be_read_now(
    write: Callable[[Path, int], Path],
    number: int,
    good_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path, 3), write(tmp_path, 4)
    with monkeypatch.context() as patch:
        _let_fail(patch, "step-4", number, good_bytes)
        with pytest.raises(RunFailedError, match=f"step-4.ckpt cannot be read now .{os.strerror(number)}"):
            newest_good_checkpoint(tmp_path)
    assert newest_good_checkpoint(tmp_path) == (tmp_path / "step-4.ckpt", [])


def test_memory_that_is_missing_below_python_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path, 4)

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("unable to mmap 1200 bytes from file </run/step-4.ckpt>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", no_memory)
    with pytest.raises(RunFailedError, match="cannot be read now .Cannot allocate memory"):
        newest_good_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, whom only root can become")
def test_a_folder_that_this_user_may_not_list_is_not_empty(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o711)
    for parent in tmp_path.parents[:2]:
        os.chmod(parent, 0o755)
    whole(tmp_path, 4)
    os.seteuid(65534)
    try:
        with pytest.raises(RunFailedError, match="cannot be read now .Permission denied"):
            newest_good_checkpoint(tmp_path)
    finally:
        os.seteuid(0)


def test_a_user_starts_again_while_the_disk_fails_and_once_more_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``runner train run_dir=run resume=auto`` three times: the second cannot read the newest checkpoint."""
    run_dir = tmp_path / "run"
    run_here(monkeypatch, run_dir, *RUN)
    files = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    before = record_of(run_dir)
    with monkeypatch.context() as patch:
        _let_fail(patch, "step-4.ckpt", errno.EIO, 64)
        with pytest.raises(RunFailedError, match="step-4.ckpt cannot be read now"):
            run_here(monkeypatch, run_dir, *RUN, "trainer.max_steps=6", "resume=auto")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == files
    assert record_of(run_dir) == before
    resumed = run_here(monkeypatch, run_dir, *RUN, "trainer.max_steps=6", "resume=auto")
    assert resumed["loss"][:4] == before["loss"]
    assert resumed["steps"] == 6


@pytest.mark.costly
def test_a_damaged_newest_checkpoint_is_kept_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    before = run_here(monkeypatch, run_dir, *RUN)
    newest = run_dir / "checkpoints" / "step-4.ckpt"
    for number in range(2):  # twice: the second finds the first one's name taken
        damaged = newest.read_bytes()[: 2000 - number]
        newest.write_bytes(damaged)
        again = run_here(monkeypatch, run_dir, *RUN, "resume=auto")
        assert again["loss"] == before["loss"]
        aside = "passed-over-1-step-4.ckpt" if number else "passed-over-step-4.ckpt"
        assert (newest.parent / aside).read_bytes() == damaged
    found = sorted(path.name for path in newest.parent.glob("*step-*"))
    assert found == ["passed-over-1-step-4.ckpt", "passed-over-step-4.ckpt", "step-2.ckpt", "step-4.ckpt"]
