"""A plan of a model from a folder says for what length it is made where no data is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.length import length_notes
from runner.config.compose.resolve import resolve


@pytest.mark.parametrize(("most", "example"), [(512, 512), (32_768, 2048), (None, 2048)])
def test_short_rows_of_random_tokens_are_told(tmp_path: Path, most: int | None, example: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": most} if most else {}))
    config = resolve(["model=huggingface", f"model.pretrained={tmp_path}"])
    (note,) = length_notes(config)
    takes = f" of the {most} that the model takes" if most else ""
    assert note.startswith(f"planned for rows of 64 random tokens{takes}; ")
    assert note.endswith(f"data.kwargs.sequence_length={example}")


def test_rows_that_are_long_enough_are_not_advised_to_be_longer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    words = ["model=huggingface", f"model.pretrained={tmp_path}", "data.kwargs.sequence_length=2048"]
    (note,) = length_notes(resolve(words))
    assert note.endswith("name your data")


def test_data_that_is_named_and_own_models_need_no_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert length_notes(resolve(["model=gpt"])) == []
    text = resolve(["model=huggingface", f"model.pretrained={tmp_path}", "data=text", "data.kwargs.path=a.txt"])
    assert length_notes(text) == []
