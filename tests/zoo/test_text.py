"""Text becomes sequences whose every token is learned once, in whatever rows they lie."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import TEXTS, json_lines, text_file, tokenizer_folder

from runner.zoo.losses import token_cross_entropy
from runner.zoo.text import build, collate
from runner.zoo.text.rows import IGNORED, pack
from runner.zoo.text.tokens import alpaca_prompt

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


def made(file: Path, folder: Path, /, **kwargs: Any) -> Any:
    return build(**{"path": str(file), "tokenizer": str(folder), "length": 24, "layout": "padded", **kwargs})


def sequences(rows: Any) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each sequence, whatever the rows."""
    found = []
    for inputs, targets in (rows[number] for number in range(len(rows))):
        if not isinstance(inputs, dict):
            found.append((inputs.tolist(), targets.tolist()))
            continue
        begins = [*torch.nonzero(inputs["position_ids"] == 0).flatten().tolist(), len(targets)]
        for begin, end in zip(begins, begins[1:], strict=False):
            if (targets[begin:end] != IGNORED).any():
                found.append((inputs["input_ids"][begin:end].tolist(), targets[begin:end].tolist()))
    return found


def words_of(tokenizer: Any, targets: list[int]) -> str:
    return str(tokenizer.decode([each for each in targets if each != IGNORED]))


def test_every_token_of_a_text_is_a_target_once(tmp_path: Path, folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    train, val = made(text_file(tmp_path), folder, length=7)
    assert val is None
    learned = [each for _, targets in sequences(train) for each in targets]
    assert learned == [each for text in TEXTS for each in [*tokenizer(text)["input_ids"][1:], tokenizer.eos_token_id]]
    assert max(len(inputs) for inputs, _ in sequences(train)) == 7


def test_packed_rows_have_the_same_sequences(tmp_path: Path, folder: Path) -> None:
    padded, packed = (made(text_file(tmp_path), folder, layout=name)[0] for name in ("padded", "packed"))
    assert sorted(sequences(packed)) == sorted(sequences(padded))
    assert len(packed) < len(padded)
    assert {len(targets) for _, targets in (packed[number] for number in range(len(packed)))} == {24}


@pytest.mark.parametrize("lengths", [[3, 3, 4, 10, 1, 7, 9], [], [10, 10], [1] * 25])
def test_packing_fills_rows_and_loses_nothing(lengths: list[int]) -> None:
    rows = pack(lengths, 10)
    assert sorted(number for row in rows for number in row) == [*range(len(lengths))]
    assert all(sum(lengths[number] for number in row) <= 10 for row in rows)
    assert sum(sum(lengths[number] for number in row) <= 5 for row in rows) <= 1  # two of them would be one


def test_a_completion_alone_is_learned(tmp_path: Path, folder: Path) -> None:
    rows = [{"prompt": "the cat sat ", "completion": "on the mat"}, {"prompt": "a dog", "completion": " ran"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    train, _ = made(json_lines(tmp_path / "pairs.jsonl", rows), folder, form="completion")
    found = sequences(train)
    assert [words_of(tokenizer, targets) for _, targets in found] == [" on the mat</s>", " ran</s>"]
    assert [tokenizer.decode(inputs) for inputs, _ in found] == ["the cat sat on the mat", "a dog ran"]


def test_an_answer_after_alpacas_prompt_is_learned(tmp_path: Path, folder: Path) -> None:
    rows = [
        {"instruction": "the cat", "input": "a dog", "output": "sat on"},
        {"instruction": "a dog", "input": "", "output": "ran over"},
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    train, _ = made(json_lines(tmp_path / "alpaca.jsonl", rows), folder, form="alpaca", length=400)
    assert [words_of(tokenizer, targets) for _, targets in sequences(train)] == ["sat on</s>", "ran over</s>"]
    with_input, without = (alpaca_prompt(row) for row in rows)
    assert with_input == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nthe cat\n\n### Input:\na dog\n\n### Response:\n"
    )
    assert "Input" not in without
    assert without.startswith("Below is an instruction that describes a task. Write a response")


def test_what_the_assistant_says_is_learned_and_its_end(tmp_path: Path, folder: Path) -> None:
    said = [("user", "the cat"), ("assistant", "sat on"), ("user", "a dog"), ("assistant", "ran over")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in said]}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    train, _ = made(json_lines(tmp_path / "talk.jsonl", rows), folder, form="chat")
    ((inputs, targets),) = sequences(train)
    assert words_of(tokenizer, targets) == "sat on</s>ran over</s>"
    whole = "<|user|>the cat</s><|assistant|>sat on</s><|user|>a dog</s><|assistant|>ran over</s>"
    assert tokenizer.decode(inputs) + "</s>" == whole


def test_a_template_that_marks_what_the_assistant_writes_is_followed(tmp_path: Path) -> None:
    """It has no prompt of a generation to tell a turn's header from what is written after it."""
    turn = "{{ message['content'] }}</s>"
    marked = f"{{%- generation -%}}{turn}{{%- endgeneration -%}}"
    choice = f"{{% if message['role'] == 'assistant' %}}{marked}{{% else %}}{turn}{{% endif %}}"
    template = f"{{% for message in messages %}}<|{{{{ message['role'] }}}}|>{choice}{{% endfor %}}"
    folder = tokenizer_folder(tmp_path / "marked", template=template)
    said = [("user", "the cat"), ("assistant", "sat on"), ("user", "a dog"), ("assistant", "ran over")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in said]}]
    train, _ = made(json_lines(tmp_path / "talk.jsonl", rows), folder, form="chat")
    ((inputs, targets),) = sequences(train)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert words_of(tokenizer, targets) == "sat on</s>ran over</s>"
    whole = "<|user|>the cat</s><|assistant|>sat on</s><|user|>a dog</s><|assistant|>ran over</s>"
    assert tokenizer.decode(inputs) + "</s>" == whole


def test_documents_without_anything_to_learn_are_told(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [[("user", "the cat"), ("assistant", "sat")], [("user", "a dog")], [("system", "sat")]]
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in talks]
    with caplog.at_level("INFO", logger="runner"):
        made(json_lines(tmp_path / "talk.jsonl", rows), folder, form="chat")
    assert "in 1 sequences of 3 documents; 2 of them have nothing to learn, and are left out" in caplog.text


def test_files_of_every_kind_give_the_same(tmp_path: Path, folder: Path) -> None:
    import datasets

    texts = TEXTS[:4]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    datasets.Dataset.from_dict({"text": texts}).to_parquet(str(tmp_path / "texts.parquet"))
    paths = [text_file(tmp_path, texts), tmp_path / "texts.parquet", tmp_path / "texts"]
    first, *others = (sequences(made(path, folder)[0]) for path in paths)
    assert others == [first, first]


def test_a_validation_set_is_a_file_or_the_last_documents(tmp_path: Path, folder: Path) -> None:
    path = text_file(tmp_path)
    train, val = made(path, folder, val_samples=5, length=7)
    whole, _ = made(path, folder, length=7)
    assert sequences(train) + sequences(val) == sequences(whole)
    (tmp_path / "val").mkdir()
    own, held = made(path, folder, validation=str(text_file(tmp_path / "val", TEXTS[-5:])), length=7)
    assert sequences(held) == sequences(val)
    assert len(own) == len(whole)


def test_too_long_a_document_is_split_cut_left_out_or_refused(tmp_path: Path, folder: Path) -> None:
    path = text_file(tmp_path, [TEXTS[2] * 3, "fish"])
    lengths = {
        fate: [len(inputs) for inputs, _ in sequences(made(path, folder, too_long=fate, length=8)[0])]
        for fate in ("split", "cut", "leave_out")
    }
    (whole, short) = (len(inputs) for inputs, _ in sequences(made(path, folder, length=999)[0]))
    assert sum(lengths["split"]) == whole + short
    assert lengths["cut"] == [8, short]
    assert lengths["leave_out"] == [short]
    with pytest.raises(ValueError, match=r"document 1: a document has \d+ positions, data.kwargs.length = 8"):
        made(path, folder, too_long="refuse", length=8)


def test_what_is_cached_follows_the_contents(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file(tmp_path)
    first = sequences(made(path, folder)[0])
    moved = path.rename(tmp_path / "moved.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr("runner.zoo.text.prepare.load_tokenizer", lambda folder: pytest.fail("it was tokenized again"))
        train, _ = made(moved, folder)
        assert sequences(train) == first
        assert sequences(made(moved, folder, layout="packed")[0])
        assert sequences(pickle.loads(pickle.dumps(train))) == first  # for a loader worker
    text_file(tmp_path, TEXTS[1:]).rename(moved)
    assert sequences(made(moved, folder)[0]) != first


def test_padding_does_not_count(tmp_path: Path, folder: Path) -> None:
    train, _ = made(text_file(tmp_path), folder)
    inputs, targets = collate([train[0], train[2]])
    assert inputs.shape == targets.shape == (2, len(train[2][0]))
    assert (targets[0, len(train[0][0]) :] == IGNORED).all()
    logits = torch.randn(*targets.shape, 300)
    total, weight = token_cross_entropy(logits, targets)
    assert int(weight) == len(train[0][0]) + len(train[2][0])
    chances = torch.log_softmax(logits.double(), -1)
    counted = [(row, at) for row in range(2) for at in range(targets.shape[1]) if targets[row, at] != IGNORED]
    expected = -sum(float(chances[row, at, targets[row, at]]) for row, at in counted)
    assert float(total) == pytest.approx(expected, rel=1e-5)


def a_folder_without_tokenizer(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "empty").mkdir()
    return {"tokenizer": str(tmp_path / "empty")}


def an_unknown_file(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.pdf").write_text("")
    return {"path": str(tmp_path / "text.pdf")}


def two_kinds(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "two").mkdir()
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / "two" / name).write_text("{}")
    return {"path": str(tmp_path / "two")}


def a_broken_file(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    return {"path": str(tmp_path / "broken.jsonl")}


def a_broken_tokenizer(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer.json").write_text("{")
    return {"tokenizer": str(tmp_path / "odd")}


def no_template(tmp_path: Path) -> dict[str, Any]:
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    folder = tokenizer_folder(tmp_path / "without", template=None)
    return {"path": str(json_lines(tmp_path / "t.jsonl", rows)), "tokenizer": str(folder), "form": "chat"}


def a_template_that_changes_its_mind(tmp_path: Path) -> dict[str, Any]:
    said = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    path = json_lines(tmp_path / "t.jsonl", [{"messages": said}])
    template = "{{ messages | length }}{% for each in messages %}{{ each['content'] }}{% endfor %}"
    folder = tokenizer_folder(tmp_path / "changing", template=template)
    return {"path": str(path), "tokenizer": str(folder), "form": "chat"}


def messages_of_another_form(tmp_path: Path) -> dict[str, Any]:
    talks = [{"role": "user", "content": "sat"}], [{"from": "gpt", "value": "sat"}]
    return {"path": str(json_lines(tmp_path / "t.jsonl", [{"messages": each} for each in talks])), "form": "chat"}


def messages_that_are_text(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(json_lines(tmp_path / "t.jsonl", [{"messages": "the cat sat"}])), "form": "chat"}


WRONG: list[tuple[Any, str]] = [
    ({"path": "/nowhere/text.jsonl"}, "is not there"),
    ({"path": None}, "must name a file"),
    ({"tokenizer": None}, "must name a folder with a tokenizer"),
    ({"tokenizer": "gpt2"}, "must be a local folder; nothing is downloaded"),
    ({"text": "body"}, "has no column body: its columns are text"),
    ({"form": "chat"}, "has no column messages"),
    ({"form": "poem"}, "must be one of text, completion, chat, alpaca"),
    ({"layout": "flat"}, "must be one of packed, padded"),
    ({"too_long": "no"}, "must be one of split, cut"),
    ({"length": 0}, "must be at least 1"),
    ({"val_samples": 24}, "leaves none for the training"),
    ({"val_samples": 2, "validation": "x"}, "leave one"),
    (a_folder_without_tokenizer, "has no tokenizer files"),
    (a_broken_tokenizer, "cannot be loaded"),
    (an_unknown_file, "is not a file of these kinds"),
    (two_kinds, "files of several kinds"),
    (a_broken_file, "cannot be read after row"),
    (no_template, "has none"),
    (messages_of_another_form, r"document 2: message 1 of a conversation has no role .*: it has from, value"),
    (messages_that_are_text, "document 1: a conversation must be a list of messages"),
    (a_template_that_changes_its_mind, "otherwise when others follow"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_every_wrong_request_is_one_line(wrong: Any, said: str, tmp_path: Path, folder: Path) -> None:
    kwargs = wrong(tmp_path) if callable(wrong) else wrong
    with pytest.raises(ValueError, match=said) as refused:
        made(text_file(tmp_path), folder, **kwargs)
    assert "\n" not in str(refused.value)


def test_a_plan_refuses_rows_that_are_all_for_validation(tmp_path: Path, folder: Path) -> None:
    asked = {"path": str(text_file(tmp_path)), "tokenizer": str(folder), "length": 24}
    build.spec(**asked, val_samples=23)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="val_samples = 24 of 24 documents leaves none for the training"):
        build.spec(**asked, val_samples=24)  # type: ignore[attr-defined]
