"""Files of a drive as the place of moved weights and activations: the same bits, and no file is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning_runs import fit, weights_of
from user_project import assert_same_weights, plain_result

from runner.errors import RunFailedError
from runner.memory.apply.drive import DriveFolder
from runner.memory.apply.host_buffers import HostBuffers


def test_memory_of_a_drive_keeps_its_bytes_and_leaves_no_file(tmp_path: Path) -> None:
    pool = HostBuffers(1 << 20, make=DriveFolder(tmp_path).memory)
    memory = pool.take(4096)
    values = torch.empty(0).set_(memory, 0, (1024,), (1,))
    values.copy_(torch.arange(1024.0))
    assert torch.equal(values.clone(), torch.arange(1024.0))
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_told_in_one_line_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailedError, match=r"no file of 4.10 kB could be made after 0 B: No space left on device$"):
        DriveFolder(tmp_path).memory(4096)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    folder = DriveFolder(tmp_path / "away")
    with pytest.raises(RunFailedError, match="No such file or directory"):
        folder.memory(1)
    with pytest.raises(RunFailedError, match="the folder is gone; go on from the last checkpoint"):
        folder.require()


@pytest.mark.costly
def test_a_run_with_files_has_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    trainer, _, _ = fit(
        "offload=weights_granular", "offload.fraction=1.0", f"offload.drive={tmp_path}", "trainer.max_steps=4"
    )
    _, expected = plain_result()
    assert_same_weights(weights_of(trainer), expected)
    assert list(tmp_path.iterdir()) == []


class Unplugged(Callback):
    """The drive is removed after the second step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *given: object) -> None:
        if trainer.global_step == 2:
            self.folder.rmdir()


def test_a_run_whose_drive_is_gone_ends_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    offload = ("offload=weights_granular", "offload.fraction=1.0", f"offload.drive={folder}")
    with pytest.raises(RunFailedError, match=r"the folder is gone; go on from the last checkpoint$"):
        fit(*offload, "trainer.max_steps=4", callbacks=[Unplugged(folder)])
