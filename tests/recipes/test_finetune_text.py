"""The recipe of fine-tuning, its part on text: its files, requests, generated names and tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.recipes.finetune import names, text

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in ("datasets", "peft", "transformers")),
    reason="the extra finetune is not installed",
)


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("names")
    names.write_files(made)
    return made


def test_the_new_language_and_what_is_held_out_are_in_no_file_before(folder: Path) -> None:
    every = names.names()
    held = names.held_out(every)
    assert 0.09 < len(held) / len(every) < 0.11
    found = {name: rows(folder / f"{name}.jsonl") for name in ("base", "base_held_out", "new", "new_held_out")}
    for name, made in found.items():
        chosen = [named for symbol, named in every.items() if (symbol in held) == name.endswith("_held_out")]
        sources = {row["prompt"].splitlines()[0] for row in made}
        assert sources == {f"{language}: {named[language]}" for named in chosen for language in names.BASE}
        assert len(made) == len(chosen) * (5 if name.startswith("new") else 20)
        assert {row["prompt"].endswith("\nit:") for row in made} == {name.startswith("new")}


def test_a_row_asks_in_one_language_and_ends_in_another(folder: Path) -> None:
    for name, prompt, completion in (
        ("new", "en: red heart\nit:", " cuore rosso"),
        ("base", "de: rotes herz\nfr:", " cœur rouge"),
    ):
        row = {"prompt": prompt, "completion": completion, "text": prompt + completion}
        assert row in rows(folder / f"{name}.jsonl")


def test_the_tokenizer_spells_every_name_and_ends_a_text(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config = resolve(["recipe=finetune_base"])
    assert len(tokenizer) == config.model.kwargs["vocab_size"]
    assert tokenizer.eos_token_id == config.model.kwargs["eos_token_id"]
    for row in [*rows(folder / "new.jsonl")[::500], {"prompt": "it:", "completion": " però 猫"}]:
        written = row["prompt"] + row["completion"]
        assert tokenizer.decode(tokenizer(written)["input_ids"]) == written


def test_its_requests_are_right() -> None:
    """All ways to learn the new language have the same data and the same number of steps and samples."""
    base, *ways = [resolve(list(words)) for words in (("recipe=finetune_base",), *text.WAYS.values())]
    assert [list(rules(config)) for config in (base, *ways)] == [[]] * 4
    assert base.data.kwargs["path"] == "outputs/finetune/names/base.jsonl"
    assert {config.data.kwargs["path"] for config in ways} == {"outputs/finetune/names/new.jsonl"}
    assert {config.data.kwargs["validation"] for config in ways} == {"outputs/finetune/names/new_held_out.jsonl"}
    assert (
        len({(config.trainer.max_steps, config.data.batch_size, config.data.kwargs["length"]) for config in ways}) == 1
    )
    assert [config.data.kwargs["form"] for config in (base, *ways)] == ["text", *["completion"] * 3]
    assert [config.adapter.name for config in ways] == ["lora", "none", "none"]
    assert [config.model.pretrained for config in ways] == ["outputs/finetune/base", "outputs/finetune/base", None]


def test_what_is_generated_does_not_depend_on_the_padding(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, intermediate_size=32, eos_token_id=0, **sizes))
    prompts = ["en: red heart\nit:", "en: a\nit:"]
    together = text.generate(model, folder, prompts)
    assert together == [text.generate(model, folder, [prompt])[0] for prompt in prompts]
    assert any(together)


def test_tables_are_made_of_what_was_measured() -> None:
    row = {"trained": 1234, "steps": 100, "loss": 0.5, "seconds": 21.7}
    before = {"trained": 0, "steps": 0, "loss": 3.25}
    named = {"emoji": "❤️", "source": "red heart", "name": "cuore rosso", "before": "corazón rojo"}
    samples = [{**named, "after": "cuore rosso", "by_peft": "cuore rosso"}, {**named, "after": "x", "by_peft": "y"}]
    told = text.markdown({"base": row, "rows": {"as it is": before, "LoRA": row}, "names": samples})
    assert "| as it is | 0 | 0 | 3.250 |  |" in told
    assert "| LoRA | 1,234 | 100 | 0.500 | 22 s |" in told
    assert "Of 2 held-out names, 0 are spelled exactly before and 1 after." in told
    assert "the same as the merged folder for 1 of them" in told
    assert "| ❤️ | red heart | corazón rojo | cuore rosso | cuore rosso |" in told
