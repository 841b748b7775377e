"""A whole fine-tuning by commands: from a folder, in two stages, partly frozen, and back into a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pretrained_folders import ARCHITECTURES, TOKENS

from runner.cli.main import main


def test_a_run_from_a_folder_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    folder, run_dir, out = ARCHITECTURES["llama"].save(tmp_path / "llama"), tmp_path / "run", tmp_path / "out"
    asked = ["model=huggingface", f"model.pretrained={folder}", f"data.kwargs.vocab_size={TOKENS}", "data.batch_size=4"]
    asked += ["data.kwargs.sequence_length=8", "parallelism.pipeline=2", "schedule.microbatches=2", "logger=none"]
    asked += ["trainer.freeze=[model.embed_tokens.*,model.layers.0.*]", "trainer.max_steps=2", "trainer.progress=false"]
    assert main(["train", *asked, f"run_dir={run_dir}"]) == 0
    assert json.loads((run_dir / "record.json").read_text())["status"] == "ok"
    assert main(["export", str(run_dir), str(out), "--format", "huggingface"]) == 0
    capsys.readouterr()
    trained = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    for name, value in ARCHITECTURES["llama"].make().state_dict().items():
        assert torch.equal(trained[name], value) == name.startswith(("model.embed_tokens", "model.layers.0.")), name


def test_what_stands_beside_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = ARCHITECTURES["llama"].save(tmp_path / "llama")
    named = ["plan", "model=huggingface", f"model.pretrained={folder}", f"data.kwargs.vocab_size={TOKENS}"]
    assert main([*named, "model.kwargs.model_type=gpt2"]) == 2
    assert "the folder's config.json names the architecture" in capsys.readouterr().err
    assert main([*named, "model.kwargs.hidden_sise=64"]) == 2
    assert "LlamaConfig has no hidden_sise (did you mean hidden_size?)" in capsys.readouterr().err
    assert main([*named, "model.kwargs.hidden_size=64"]) == 0  # a plan reads no weights
    assert main(["train", *named[1:], "model.kwargs.hidden_size=64", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "must hold model.embed_tokens.weight with the shape (64, 64). It is (64, 32)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
