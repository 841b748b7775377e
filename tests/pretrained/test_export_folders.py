"""Weights as a folder of transformers, which ``from_pretrained`` opens, or as torch's distributed checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretrained_folders import ARCHITECTURES
from safetensors.torch import save_file
from test_pretrained_files import lines, small, started
from test_pretrained_files import request as files_request
from test_pretrained_folders import request

from runner.checkpoint.file import write_checkpoint
from runner.cli.main import main
from runner.config.compose.resolve import to_container
from runner.config.schema import RunConfig
from runner.model.layers import build_stage
from runner.model.load import load_model
from runner.record import RunRecord


def finished_run(config: RunConfig, run_dir: Path) -> dict[str, torch.Tensor]:
    """A run's directory with a checkpoint of weights that differ from those it started from."""
    layers = load_model(config, filled=True).layers
    state = build_stage(layers, 0, len(layers) - 1).global_state()
    state = {name: value * 1.5 + 0.01 if value.is_floating_point() else value for name, value in state.items()}
    write_checkpoint({"state_dict": state, "global_step": 3}, run_dir / "checkpoints" / "step-3.ckpt")
    RunRecord(config=to_container(config)).save(run_dir)
    return state


def check_export(name: str, folder: Path, run_dir: Path, *words: str, dtype: torch.dtype = torch.float32) -> Path:
    """Export a run that started from a folder; logits are those of the trained weights, bit for bit."""
    case = ARCHITECTURES[name]
    state = finished_run(request(name, folder, pipeline=1), run_dir)
    out = run_dir / "out"
    assert main(["export", str(run_dir), str(out), "--format", "huggingface", *words]) == 0
    model, expected = case.open(out).eval(), case.make().eval()
    expected.load_state_dict({key: value.to(dtype) for key, value in state.items()}, strict=False)
    inputs = case.inputs(2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(case.logits(model, inputs), case.logits(expected, inputs))
    return out


def test_a_folder_for_from_pretrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    folder = ARCHITECTURES["llama_tied"].save(tmp_path / "llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").touch()
    out = check_export("llama_tied", folder, tmp_path / "run", "--max-shard-size", "30KB")
    assert "tensors" in capsys.readouterr().out
    shards = len(list(out.glob("model-*.safetensors")))
    files = {path.name for path in out.iterdir() if path.suffix != ".safetensors"}
    assert shards > 1
    assert files == {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert json.loads((out / "config.json").read_text())["use_cache"] is True
    assert lines(request("llama_tied", out)) == []  # it starts the next run
    again = ["export", str(tmp_path / "run"), str(out), "--format", "huggingface"]
    assert main(again) == 2
    assert f"FOLDER = {out}: must be a new folder" in capsys.readouterr().err


def test_experts_are_taken_apart_again_and_converted(tmp_path: Path) -> None:
    folder = ARCHITECTURES["mixtral"].save(tmp_path / "mixtral")
    out = check_export("mixtral", folder, tmp_path / "run", "--dtype", "bf16", dtype=torch.bfloat16)
    import json

    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_exported(name: str, tmp_path: Path) -> None:
    check_export(name, ARCHITECTURES[name].save(tmp_path / name), tmp_path / "run", "--max-shard-size", "200KB")


def test_a_distributed_checkpoint_and_back(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    save_file(dict(small().state_dict()), tmp_path / "a.safetensors")
    state = finished_run(files_request(tmp_path / "a.safetensors"), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    found = started(files_request(tmp_path / "dcp"))
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    read = {name: torch.empty_like(value) for name, value in state.items()}
    load(read, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(read[name], value) for name, value in state.items())


def test_wrong_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(dict(small().state_dict()), tmp_path / "a.safetensors")
    finished_run(files_request(tmp_path / "a.safetensors"), tmp_path / "run")
    for words, told in (
        (
            ["--format", "hugingface"],
            "--format = hugingface: must be one of safetensors, huggingface, peft, dcp. Try --format huggingface.",
        ),
        (["--dtype", "fp8"], "--dtype = fp8: must be one of fp32, bf16, fp16."),
        (["--max-shard-size", "5GB"], "--max-shard-size = 5GB: belongs to --format huggingface."),
        (["--format", "huggingface", "--max-shard-size", "big"], "--max-shard-size = big: must be a size."),
        (
            ["--format", "huggingface"],
            "needs a model of transformers. model.target=test_pretrained_files:small has no save_pretrained",
        ),
    ):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *words]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
