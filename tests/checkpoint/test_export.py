"""One safetensors file from any checkpoint, which plain PyTorch loads into the user's own module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from resume_zoo import model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.checkpoint.file import write_checkpoint
from runner.checkpoint.parts import write_part
from runner.cli.main import main
from runner.errors import RequestError, RunFailedError
from runner.training import export as exporting
from runner.training.export import export


def save(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    weights = dict(model().state_dict())
    write_checkpoint({"state_dict": weights, "global_step": step}, run_dir / "checkpoints" / f"step-{step}.ckpt")
    return weights


def test_the_newest_weights_load_into_the_users_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    file = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path), str(file)]) == 0
    shown = capsys.readouterr().out
    assert "6 tensors" in shown
    assert "after step 10" in shown
    module = model()
    module.load_state_dict(load_file(file))
    assert all(torch.equal(tensor, newest[name]) for name, tensor in module.state_dict().items())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "10"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def test_damage_is_passed_over_and_a_checkpoint_may_be_named(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    save(tmp_path, 2)
    os.truncate(tmp_path / "checkpoints" / "step-2.ckpt", 900)
    done = export(tmp_path, tmp_path / "a.safetensors")
    assert (done.step, done.tensors) == (1, 6)
    assert done.num_bytes == sum(tensor.nbytes for tensor in older.values())
    assert export(tmp_path / "checkpoints" / "step-1.ckpt", tmp_path / "b.safetensors").step == 1
    with pytest.raises(RequestError, match="step-2.ckpt: must be .* a good checkpoint. It is damaged"):
        export(tmp_path / "checkpoints" / "step-2.ckpt", tmp_path / "c.safetensors")


def test_a_checkpoint_in_parts_may_be_named(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "step-3.ckpt"
    for rank in range(2):
        write_part({"state_dict": {f"{rank}.weight": torch.ones(2)}, "global_step": 3}, place, rank, 2)
    assert export(place, tmp_path / "a.safetensors").tensors == 2
    (place / "rank-1-of-2.safetensors").unlink()
    with pytest.raises(RequestError, match="the part of rank 1 of 2 is not there"):
        export(place, tmp_path / "b.safetensors")


def test_without_checkpoints_the_runs_weights_are_taken(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "weights.safetensors")
    assert export(tmp_path, tmp_path / "a.safetensors").step is None
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(3))
    os.truncate(tmp_path / "weights.safetensors", 20)
    with pytest.raises(RequestError, match="must hold a good checkpoint. weights.safetensors is damaged"):
        export(tmp_path, tmp_path / "b.safetensors")


def test_tied_and_transposed_tensors_and_nan_keep_their_names_and_bits(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    weights = {"in.weight": tied, "out.weight": tied, "t": tied.t(), "row": tied[1], "nan": torch.full((2,), torch.nan)}
    write_checkpoint({"state_dict": weights, "global_step": 1}, tmp_path / "checkpoints" / "step-1.ckpt")
    export(tmp_path, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights if name != "nan")
    assert bool(found["nan"].isnan().all())


def test_an_empty_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="There is no checkpoints/step-N.ckpt and no weights.safetensors in it"):
        export(tmp_path, tmp_path / "a.safetensors")


def test_what_reads_back_otherwise_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(exporting, "load_file", lambda path: {"0.weight": torch.zeros(1)})
    with pytest.raises(RunFailedError, match="differs when it is read back: 0.weight"):
        export(tmp_path, tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
