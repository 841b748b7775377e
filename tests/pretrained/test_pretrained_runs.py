"""A whole fine-tuning by commands: from a folder, partly frozen, and back into a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from covering import sampled
from pretrained_folders import ARCHITECTURES, TOKENS

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.check_pretrained import pretrained_problems
from runner.profiling.model import profile_model

CASE = ARCHITECTURES["llama"]


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", sampled([1, 2], 1))
def test_a_run_from_a_folder_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], pipeline: int) -> None:
    """What is frozen keeps its bits, everything else is trained, and the memory is the predicted one."""
    folder, run_dir, out = CASE.save(tmp_path / "llama"), tmp_path / "run", tmp_path / "out"
    asked = ["model=huggingface", f"model.pretrained={folder}", f"data.kwargs.vocab_size={TOKENS}", "data.batch_size=4"]
    asked += ["data.kwargs.sequence_length=8", f"parallelism.pipeline={pipeline}", "schedule.microbatches=2"]
    asked += ["trainer.freeze=[model.embed_tokens.*,model.layers.0.*]", "trainer.max_steps=2", "trainer.progress=false"]
    assert main(["train", *asked, "partition=uniform", "logger=none", f"run_dir={run_dir}"]) == 0
    record = json.loads((run_dir / "record.json").read_text())
    assert record["status"] == "ok"
    memory = record["peak_memory_bytes"]
    assert memory["predicted"] == pytest.approx(memory["measured"], rel=0.05)
    assert main(["export", str(run_dir), str(out), "--format", "huggingface"]) == 0
    capsys.readouterr()
    trained = CASE.open(out).state_dict()
    for name, value in CASE.make().state_dict().items():
        assert torch.equal(trained[name], value) == name.startswith(("model.embed_tokens", "model.layers.0.")), name


@pytest.mark.costly
def test_what_stands_beside_a_folder(tmp_path: Path) -> None:
    """A field of the configuration replaces the folder's; what does not fit the folder is refused."""
    named = [
        "model=huggingface",
        f"model.pretrained={CASE.save(tmp_path / 'llama')}",
        f"data.kwargs.vocab_size={TOKENS}",
    ]
    for word, told in (
        ("model.kwargs.model_type=gpt2", "the folder's config.json names the architecture"),
        ("model.kwargs.hidden_sise=64", r"LlamaConfig has no hidden_sise \(did you mean hidden_size\?\)"),
    ):
        with pytest.raises(RequestError, match=told):
            profile_model(resolve([*named, word, "device=cpu"]))
    wider = resolve([*named, "model.kwargs.hidden_size=64", "device=cpu"])
    assert profile_model(wider).layers  # a plan reads no weights
    found = [problem.line() for problem in pretrained_problems(wider)]
    assert any("must hold model.embed_tokens.weight with the shape (64, 64). It is (64, 32)" in line for line in found)


def test_a_plan_refuses_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a run does; planned weights may be absent beside their configuration."""
    assert main(["plan", "model=mlp", f"model.pretrained={tmp_path / 'nowhere'}"]) == 2
    assert "model.pretrained" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for model in (["model=mlp"], []):  # without a name, the model of the default recipe would be planned
        assert main(["plan", *model, f"model.pretrained={tmp_path}"]) == 2
        assert "does not read the architecture that config.json names. Try model=huggingface" in capsys.readouterr().err
