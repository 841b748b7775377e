"""A model that was trained from fresh weights on text is exported with the tokenizer that its tokens are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_export_folders import finished_run
from tiny_text import text_file, tokenizer_folder

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig

transformers = pytest.importorskip("transformers")
FIELDS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def request(tmp_path: Path, tokenizer: Path) -> RunConfig:
    words = ["model=huggingface", "model.kwargs.model_type=llama", "model.kwargs.vocab_size=320", "data=text"]
    words += [f"{'+' if key == 'intermediate_size' else ''}model.kwargs.{key}={value}" for key, value in FIELDS.items()]
    return resolve([*words, f"data.kwargs.path={text_file(tmp_path)}", f"data.kwargs.tokenizer={tokenizer}"])


def export(tmp_path: Path) -> int:
    return main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "huggingface"])


def test_the_folder_has_the_tokenizer_and_generates(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    finished_run(request(tmp_path, tokenizer), tmp_path / "run")
    assert export(tmp_path) == 0
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tokenizer / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    opened = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).eval()
    ids = torch.tensor([opened("the cat sat")["input_ids"]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_a_tokenizer_that_has_gone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(request(tmp_path, tokenizer_folder(tmp_path / "tokenizer")), tmp_path / "run")
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    assert export(tmp_path) == 2
    assert f"data.kwargs.tokenizer = {tmp_path / 'tokenizer'} must be a local folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
