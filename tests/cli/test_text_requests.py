"""Every request for text that cannot be met is one line, with status 2, in a plan and in a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_text import text_file, tokenizer_folder

from runner.cli.main import main
from runner.config.compose.resolve import resolve

pytest.importorskip("transformers")
pytest.importorskip("datasets")

GPT2 = ("model=huggingface", "model.kwargs.vocab_size=320", "data=text", "data.batch_size=4", "logger=none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def words(path: Path | str, folder: Path | str, *more: str) -> list[str]:
    return [*GPT2, f"data.kwargs.path={path}", f"data.kwargs.tokenizer={folder}", "data.kwargs.length=32", *more]


def test_the_loss_goes_with_the_data() -> None:
    asked = words("text.jsonl", "folder")
    assert resolve(asked).loss.name == "token_cross_entropy"
    assert resolve([*asked, "loss=custom", "loss.target=mine:loss"]).loss.name == "custom"
    assert resolve(["model=huggingface", "data=text"]).data.kwargs["tokenizer"] is None


def wrong_path(folder: Path) -> list[str]:
    return words("nowhere.jsonl", folder)


def no_tokenizer(folder: Path) -> list[str]:
    Path("empty").mkdir()
    return words("text.jsonl", "empty")


def wrong_loss(folder: Path) -> list[str]:
    return words("text.jsonl", folder, "loss=mse")


def wrong_argument(folder: Path) -> list[str]:
    return words("text.jsonl", folder, "+data.kwargs.lenght=3")


def of_layers(model: str, folder: Path) -> list[str]:
    return [model, *(word for word in words("text.jsonl", folder) if not word.startswith("model"))]


def no_such_layers(folder: Path) -> list[str]:
    """The model is a list of layers, of which the first takes ids alone."""
    return of_layers("model=gpt", folder)


def a_model_that_mixes_sequences(folder: Path) -> list[str]:
    return words("text.jsonl", folder, "model.kwargs.model_type=opt", "+model.kwargs.word_embed_proj_dim=128")


def other_columns(folder: Path) -> list[str]:
    return words("text.jsonl", folder, "data.kwargs.form=completion")


def no_chat_template(folder: Path) -> list[str]:
    Path("chats.jsonl").write_text('{"messages": []}\n')
    return words("chats.jsonl", tokenizer_folder(Path("bare"), template=None), "data.kwargs.form=chat")


SAID = [
    (other_columns, "text.jsonl has no column prompt: its columns are text"),
    (no_chat_template, "needs a tokenizer with a chat template"),
    (wrong_path, "nowhere.jsonl is not there"),
    (no_tokenizer, "has no tokenizer files"),
    (wrong_loss, "must be the loss that goes with data=text"),
    (wrong_argument, "is no argument of"),
    (no_such_layers, "must take what"),
    (a_model_that_mixes_sequences, "lets a row's sequences see each other"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("wrong", "said"), SAID, ids=[each.__name__ for each, _ in SAID])
def test_a_plan_refuses_it(
    wrong: object, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_file(tmp_path)
    assert callable(wrong)
    assert main(["plan", *wrong(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("package", ["datasets", "transformers"])
def test_a_missing_package_is_named(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    assert main(["plan", *of_layers("model=mlp", folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data.target = runner.zoo.text:build: needs {package}, which is not installed.")
    assert line.endswith("Try pip install -e '.[finetune]'.")
