"""Files that a crash finds in the making: the old one stays, and what is reported as saved is on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner.checkpoint.parts import write_part
from runner.config.compose.resolve import load, resolve, save
from runner.errors import RunFailedError
from runner.training import finish
from runner.training.finish import _save_weights


def _full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_request_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(resolve(["model=mlp", "seed=1"]), tmp_path / "config.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        with pytest.raises(OSError, match="No space"):
            save(resolve(["model=mlp", "seed=2"]), file)
    assert load(file).seed == 1
    assert list(tmp_path.iterdir()) == [file]


def test_weights_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.safetensors"
    _save_weights({"w": torch.ones(3)}, file)

    def half(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        _full()

    with monkeypatch.context() as patch:
        patch.setattr(finish, "save_file", half)
        with pytest.raises(RunFailedError, match=r"weights\.safetensors could not be written: .*No space"):
            _save_weights({"w": torch.zeros(3)}, file)
    assert torch.equal(load_file(file)["w"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [file]


def test_every_new_folder_on_the_way_to_a_part_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power that fails after a save was reported must not take the folder with it."""
    synced: list[Path] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    folder = tmp_path / "run" / "checkpoints" / "step-4.ckpt"
    write_part({"state_dict": {"w": torch.ones(1)}, "global_step": 4}, folder, 0, 1)
    for parent, name in ((tmp_path, "run"), (tmp_path / "run", "checkpoints"), (folder.parent, folder.name)):
        assert parent in synced, f"the name {name} in {parent} is not on the disk"
    assert folder in synced
