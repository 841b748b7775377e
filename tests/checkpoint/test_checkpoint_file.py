"""Checkpoint files: whole or not at all, trusted only when good, and never code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.durable import TEMPORARY
from runner.checkpoint.file import (
    CheckpointError,
    checkpoint_files,
    damage_of,
    newest_good_checkpoint,
    read_checkpoint,
    remove_leftovers,
    write_checkpoint,
)
from runner.errors import RunFailedError


def content(step: int) -> dict[str, Any]:
    weights = {"0.weight": torch.full((300,), float(step)), "0.bias": torch.arange(4)}
    return {"state_dict": weights, "global_step": step, "plain": [1, ("a", None), {"b": 2.5}]}


def write(directory: Path, *steps: int) -> list[Path]:
    paths = [directory / f"step-{step}.ckpt" for step in steps]
    for step, path in zip(steps, paths, strict=True):
        write_checkpoint(content(step), path)
    return paths


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "new", 3)
    found = read_checkpoint(path)
    assert found["plain"] == content(3)["plain"]
    assert torch.equal(found["state_dict"]["0.weight"], content(3)["state_dict"]["0.weight"])
    assert damage_of(path) is None
    assert [each.name for each in path.parent.iterdir()] == ["step-3.ckpt"]


def test_files_are_listed_by_step(tmp_path: Path) -> None:
    write(tmp_path, 10, 9, 2)
    (tmp_path / "step-x.ckpt").write_bytes(b"")
    assert list(checkpoint_files(tmp_path)) == [2, 9, 10]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_passed_over(tmp_path: Path, part: float) -> None:
    good, newer = write(tmp_path, 9, 10)
    os.truncate(newer, int(newer.stat().st_size * part))
    found, passed = newest_good_checkpoint(tmp_path)
    assert found == good
    assert len(passed) == 1
    assert passed[0].startswith("step-10.ckpt is passed over: it is damaged or cut short")


def test_changed_bytes_of_a_tensor_are_seen(tmp_path: Path) -> None:
    good, newer = write(tmp_path, 1, 7)
    whole = bytearray(newer.read_bytes())
    at = whole.index(content(7)["state_dict"]["0.weight"].numpy().tobytes()) + 401
    whole[at] ^= 1
    newer.write_bytes(whole)
    read_checkpoint(newer)  # to be read is not to be good
    assert newest_good_checkpoint(tmp_path)[0] == good


def test_without_a_good_file_there_is_none(tmp_path: Path) -> None:
    assert newest_good_checkpoint(tmp_path / "nowhere") == (None, [])
    (path,) = write(tmp_path, 1)
    path.write_bytes(b"not a checkpoint")
    assert newest_good_checkpoint(tmp_path)[0] is None


class Runs:
    """What a stranger's file may hold."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("the file ran code",)


def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-1.ckpt"
    torch.save({**content(1), "callbacks": Runs()}, path)
    with pytest.raises(CheckpointError, match=r"posix:mkdir .*neither a tensor nor a plain value"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"posix:mkdir"):  # nothing is damaged, so that nothing is passed over
        newest_good_checkpoint(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1.ckpt"]


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.ones(1)}, tmp_path / "step-1.ckpt")
    assert "no state_dict and global_step" in str(damage_of(tmp_path / "step-1.ckpt"))


def test_what_could_not_be_loaded_is_not_written(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 1)
    before = path.read_bytes()
    with pytest.raises(RunFailedError, match=r"could not be loaded again: .*tensors and plain values"):
        write_checkpoint({**content(2), "callbacks": Path("x")}, path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    (path,) = write(tmp_path, 1)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RunFailedError, match=r"step-1\.ckpt could not be written: .*(space|Writer)"):
        write_checkpoint(content(2), path)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1.ckpt"]
    assert read_checkpoint(path)["global_step"] == 1


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 1)
    (tmp_path / f"{TEMPORARY}abc-step-2.ckpt").write_bytes(b"half")
    assert newest_good_checkpoint(tmp_path)[0] == path
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
