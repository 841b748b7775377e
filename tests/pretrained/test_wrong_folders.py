"""Every wrong request of a fine-tuning is one line that names the mistake, and exit status 2."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from covering import covering
from pretrained_folders import ARCHITECTURES, TOKENS

from runner.cli.main import main

CASE = ARCHITECTURES["llama"]
WORDS = [f"data.kwargs.vocab_size={TOKENS}", "data.kwargs.sequence_length=8", "data.batch_size=4", "device=cpu"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASE.save(tmp_path_factory.mktemp("folders") / "llama")


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


def _without_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _without_a_shard(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def _of_other_sizes(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**content, "vocab_size": TOKENS + 1}), encoding="utf-8")


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (_gone, "must be a folder or a safetensors file. There is no such folder."),
    "without weights": (_without_weights, "must hold model.safetensors, or shards and model.safetensors.index.json."),
    "without config": (_without_config, "must hold config.json, from which the model is made. It holds none."),
    "without a shard": (_without_a_shard, "must hold model-00001-of-"),
    "of other sizes": (_of_other_sizes, f"with the shape ({TOKENS + 1}, 32). It is ({TOKENS}, 32) in the files."),
}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that a wrong request is told in."""
    assert main([*words, *WORDS]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


@pytest.mark.costly
@pytest.mark.parametrize(("command", "name"), covering({"command": ["train", "plan"], "name": FOLDERS}, strength=1))
def test_a_wrong_folder(
    name: str, command: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = FOLDERS[name]
    folder = tmp_path / "llama"
    shutil.copytree(whole, folder)
    spoil(folder)
    request = [command, "model=huggingface", f"model.pretrained={folder}", f"run_dir={tmp_path / 'run'}"]
    if (name, command) == ("without weights", "plan"):
        assert main([*request, *WORDS]) == 0  # sizes are all that a plan needs
        return
    lines = told(capsys, *request)
    assert all(line.startswith(f"model.pretrained = {folder}: ") for line in lines), lines
    assert len(lines) == (2 if name == "of other sizes" else 1), lines  # the embedding and the head: a line each
    assert expected in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pipeline", [1, 2])
def test_targets_that_match_nothing(
    pipeline: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=huggingface", f"model.pretrained={whole}", "adapter=lora", "adapter.targets=[q_projection]"]
    (line,) = told(capsys, "train", *words, f"parallelism.pipeline={pipeline}", "schedule.microbatches=2")
    assert line.startswith("adapter.targets = q_projection: must name layers. No layer of the model has this name")


@pytest.mark.parametrize("command", ["train", "plan"])
def test_peft_that_is_not_installed(
    command: str, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    (line,) = told(capsys, command, "model=huggingface", f"model.pretrained={whole}", "adapter=lora")
    assert line.startswith("adapter = lora: ")
    assert "peft" in line
    assert "pip install -e '.[finetune]'" in line
