"""Checkpoints in parts: good when all parts are there and good, and never code."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_runs import ROOT

from runner.checkpoint.durable import TEMPORARY
from runner.checkpoint.file import damage_of, newest_good_checkpoint, read_checkpoint, remove_leftovers
from runner.checkpoint.parts import write_part
from runner.errors import RunFailedError


def parts(step: int) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"global_step": step, "loops": {"a": [1, (2, None)], 7: 0.1 + 0.2}}
    settings = [{"lr": 0.1, "betas": (0.9, 0.999)}]
    return [
        {
            **common,
            "state_dict": {f"{rank}.weight": torch.full((3, 5), float(step + rank)), f"{rank}.n": torch.tensor(rank)},
            "optimizer_states": [{"state": {f"{rank}.weight": {"step": torch.ones(())}}, "param_groups": settings}],
            "replica_buffers": {rank: {"mean": torch.zeros(2, dtype=torch.bfloat16)}},
        }
        for rank in range(2)
    ]


def write(directory: Path, step: int) -> Path:
    path = directory / f"step-{step}.ckpt"
    for rank, part in enumerate(parts(step)):
        write_part(part, path, rank, 2)
    return path


def test_what_all_ranks_write_is_read_as_one(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert damage_of(path) is None
    found, (first, second) = read_checkpoint(path), parts(3)
    assert list(found["state_dict"]) == [*first["state_dict"], *second["state_dict"]]
    for part in (first, second):
        assert all(torch.equal(found["state_dict"][name], value) for name, value in part["state_dict"].items())
    (state,) = found["optimizer_states"]
    assert list(state["state"]) == ["0.weight", "1.weight"]
    assert state["param_groups"] == first["optimizer_states"][0]["param_groups"]
    assert isinstance(state["param_groups"][0]["betas"], tuple)
    assert found["loops"] == first["loops"]
    assert found["replica_buffers"][1]["mean"].dtype == torch.bfloat16


def test_a_save_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    good, newer = write(tmp_path, 3), write(tmp_path, 4)
    (newer / "rank-1-of-2.safetensors").rename(newer / f"{TEMPORARY}abc")
    (newer / ".tmp7JZb4g").touch()  # as safetensors calls what it writes
    found, passed = newest_good_checkpoint(tmp_path)
    assert found == good
    assert passed == ["step-4.ckpt is passed over: it was cut short: the part of rank 1 of 2 is not there"]
    remove_leftovers(tmp_path)
    assert [each.name for each in newer.iterdir()] == ["rank-0-of-2.safetensors"]
    write_part(parts(4)[0], newer, 0, 3)
    assert "parts of several saves" in str(damage_of(newer))
    (tmp_path / "step-5.ckpt").mkdir()
    assert "no part" in str(damage_of(tmp_path / "step-5.ckpt"))


def test_no_damage_goes_unseen(tmp_path: Path) -> None:
    """A bit, or the end, anywhere in a part."""
    path = write(tmp_path, 3)
    for seed in range(60):
        drawn = random.Random(seed)
        part = path / f"rank-{drawn.randrange(2)}-of-2.safetensors"
        good = part.read_bytes()
        damaged = bytearray(good)
        if seed % 4 == 0:
            del damaged[drawn.randrange(len(damaged)) :]
        else:
            damaged[drawn.randrange(len(damaged))] ^= 1 << drawn.randrange(8)
        part.write_bytes(damaged)
        assert part.name in str(damage_of(path)), seed
        part.write_bytes(good)


def test_a_foreign_part_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "step-1.ckpt"
    path.mkdir()
    for header in (None, {"content": "[" * 100_000, "sha256": ""}, {"content": '{"tensor": "x"}', "sha256": ""}):
        save_file({"0.weight": torch.ones(1)}, path / "rank-0-of-1.safetensors", header)
        assert "rank-0-of-1.safetensors is" in str(damage_of(path))
    torch.save({"state_dict": {}}, path / "rank-0-of-1.safetensors")
    assert "rank-0-of-1.safetensors is damaged or no part" in str(damage_of(path))


def test_what_could_not_be_loaded_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"could not be loaded again: callbacks/x is a PosixPath"):
        write_part({"callbacks": {"x": Path("x")}}, tmp_path / "step-1.ckpt", 0, 1)
    assert list((tmp_path / "step-1.ckpt").iterdir()) == []


@pytest.mark.costly
def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    """The kernel itself refuses to write on: files may have 1 MiB."""
    good = write(tmp_path, 1)
    code = (
        "import torch; from pathlib import Path; from runner.errors import RunFailedError\n"
        "from runner.checkpoint.parts import write_part\n"
        f"path = Path({str(tmp_path / 'step-2.ckpt')!r})\n"
        "try: write_part({'state_dict': {'w': torch.ones(1 << 20)}}, path, 0, 1)\n"
        "except RunFailedError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500, check=True,
    )  # fmt: skip
    assert "step-2.ckpt/rank-0-of-1.safetensors could not be written" in done.stdout
    assert "File too large" in done.stdout
    assert list((tmp_path / "step-2.ckpt").iterdir()) == []
    assert newest_good_checkpoint(tmp_path)[0] == good
