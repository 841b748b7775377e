"""A folder for swapped states: each run has its own, killed runs' are removed, and writes to it are checked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.errors import RunFailedError
from runner.strategy.zero.drive import CheckedDrive, SwapFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from runner.strategy.zero.drive import SwapFolder
folder = SwapFolder(Path(sys.argv[1]))
(folder.path / "file").write_bytes(b"1")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Handle:
    """Notes what it is asked to write and to read."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def async_pwrite(self, buffer: torch.Tensor, path: str) -> int:
        self.asked.append(("write", path))
        return 0

    def async_pread(self, buffer: torch.Tensor, path: str) -> int:
        self.asked.append(("read", path))
        return 0


def test_two_runs_have_folders_of_their_own_and_leave_none(tmp_path: Path) -> None:
    one, other = SwapFolder(tmp_path / "drive"), SwapFolder(tmp_path / "drive")
    assert one.path != other.path
    assert one.path.is_dir()
    one.remove()
    assert list((tmp_path / "drive").iterdir()) == [other.path]
    other.remove()
    assert list((tmp_path / "drive").iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert (left / "file").exists()
    (tmp_path / "of the user").mkdir()
    held = SwapFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([held.path, tmp_path / "of the user"])
    held.remove()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailedError, match=r"^offload.nvme_path=.*file/drive: no folder could be made: Not a dir"):
        SwapFolder(tmp_path / "file" / "drive")


def test_a_file_has_room_before_it_is_written(tmp_path: Path) -> None:
    handle, file = Handle(), tmp_path / "file"
    CheckedDrive(handle).async_pwrite(torch.zeros(100), str(file))
    assert file.stat().st_size == 400
    assert handle.asked == [("write", str(file))]


def test_a_full_drive_and_a_lost_folder_are_told_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    drive, buffer = CheckedDrive(handle), torch.zeros(100)
    with pytest.raises(RunFailedError, match=r"gone/file is gone; go on from the last checkpoint$"):
        drive.async_pwrite(buffer, str(tmp_path / "gone" / "file"))
    with pytest.raises(RunFailedError, match=r"gone/file is gone; go on from the last checkpoint$"):
        drive.async_pread(buffer, str(tmp_path / "gone" / "file"))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailedError, match=r"no file of 400 B could be made in .*: No space left on device; go on"):
        drive.async_pwrite(buffer, str(tmp_path / "file"))
    assert handle.asked == []
