"""Files of a run have the rights that the user's umask leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.checkpoint.file import write_checkpoint
from runner.files import write_atomically
from runner.training.export import export


@pytest.fixture(params=[0o077, 0o027, 0o002], ids=oct)
def expected(request: pytest.FixtureRequest) -> Iterator[int]:
    """The rights of a new file under a umask that holds during the test."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def _rights(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_that_replace_others(expected: int, tmp_path: Path) -> None:
    write_atomically(tmp_path / "record.json", "{}")
    assert _rights(tmp_path / "record.json") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_checkpoints_and_exports(expected: int, tmp_path: Path) -> None:
    path = tmp_path / "step-1.ckpt"
    write_checkpoint({"state_dict": {"weight": torch.ones(3)}, "global_step": 1}, path)
    export(path, tmp_path / "model.safetensors")
    assert [_rights(path), _rights(tmp_path / "model.safetensors")] == [expected, expected]
