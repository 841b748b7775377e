"""A plan of a model from a folder says for what length it is made where no data is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.length_notes import length_notes
from runner.config.compose.resolve import resolve


@pytest.mark.parametrize(
    ("content", "length", "takes"),
    [
        ({"max_position_embeddings": 512}, 512, " of the 512 that the model takes"),
        ({"max_position_embeddings": 32_768}, 2048, " of the 32768 that the model takes"),
        ({"n_positions": 1024}, 1024, " of the 1024 that the model takes"),
        ({}, 64, ""),
        ({"max_position_embeddings": None}, 64, ""),
    ],
)
def test_rows_are_as_long_as_people_train_on(tmp_path: Path, content: dict[str, Any], length: int, takes: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = resolve(["model=huggingface", f"model.pretrained={tmp_path}"])
    assert config.data.kwargs["sequence_length"] == length
    (note,) = length_notes(config)
    told = "memory and time grow with the length: name your data"
    advice = "" if takes else ", or data.kwargs.sequence_length=2048"
    assert note == f"planned for rows of {length} random tokens{takes}; {told}{advice}"


def test_a_length_that_is_named_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    words = ["model=huggingface", f"model.pretrained={tmp_path}", "data.kwargs.sequence_length=128"]
    config = resolve(words)
    assert config.data.kwargs["sequence_length"] == 128
    (note,) = length_notes(config)
    assert note.endswith("name your data, or data.kwargs.sequence_length=2048")


def test_a_folder_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    for folder in (tmp_path, tmp_path / "none"):
        config = resolve(["model=huggingface", f"model.pretrained={folder}"])
        assert config.data.kwargs["sequence_length"] == 64


def test_data_that_is_named_and_own_models_need_no_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert length_notes(resolve(["model=gpt"])) == []
    text = resolve(["model=huggingface", f"model.pretrained={tmp_path}", "data=text", "data.kwargs.path=a.txt"])
    assert length_notes(text) == []


@pytest.mark.parametrize(("length", "is_told"), [(64, False), (65, True)])
def test_rows_of_text_beyond_the_positions_of_the_model_are_told(tmp_path: Path, length: int, is_told: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    words = ["model=huggingface", f"model.pretrained={tmp_path}", "data=text", "data.kwargs.path=a.txt"]
    told = "rows of 65 tokens are longer than the 64 positions that the model was made for: data.kwargs.length=64"
    assert length_notes(resolve([*words, f"data.kwargs.length={length}"])) == [told] * is_told


@pytest.mark.parametrize(("known", "more", "size"), [(200, (), 200), (32_000, (), 512), (200, ("=300",), 300)])
def test_random_tokens_are_those_that_the_folders_model_knows(
    tmp_path: Path, known: int, more: tuple[str, ...], size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": known}))
    words = ["model=huggingface", f"model.pretrained={tmp_path}", *(f"data.kwargs.vocab_size{each}" for each in more)]
    assert resolve(words).data.kwargs["vocab_size"] == size
