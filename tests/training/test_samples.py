"""What a model writes at validations is what the whole model would write, in a pipeline too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import thread_runs
import torch
from tiny_text import tokenizer_folder

from runner.cli.main import main
from runner.training.samples import Samples
from runner.zoo.gpt import build

SIZES = {"vocab_size": 32, "sequence_length": 12, "width": 16, "layers": 2, "heads": 2}
PROMPTS = [[1, 2, 3], [7], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]]
WORDS = (
    *("model=gpt", "data=random_tokens", "data.batch_size=8", "data.kwargs.samples=32", "data.kwargs.val_samples=8"),
    *(f"model.kwargs.{key}={value}" for key, value in SIZES.items()),
    *("data.kwargs.vocab_size=32", "data.kwargs.sequence_length=12", "optimizer.lr=0.05", "device=cpu"),
    *("trainer.max_steps=4", "trainer.val_every=2", "callbacks=samples", "checkpoint=none"),
    *(f"callbacks.samples.kwargs.prompts={PROMPTS}".replace(" ", ""), "callbacks.samples.kwargs.tokens=5"),
)


def written_by_one(weights: dict[str, torch.Tensor], prompt: list[int]) -> list[int]:
    """Greedy decoding by the whole model; a row of 12 positions leaves room for 11 tokens of a prompt at most."""
    model = torch.nn.Sequential(*[make() for make in build(**SIZES).layers()]).eval()
    model.load_state_dict(weights)
    row = prompt[-11:]
    made: list[int] = []
    while len(made) < 5 and len(row) < 12:
        padded = torch.tensor([row + [0] * (12 - len(row))])
        with torch.no_grad():
            made.append(int(model(padded)[0, len(row) - 1].argmax()))
        row = [*row, made[-1]]
    return made


@pytest.mark.costly
@pytest.mark.parametrize("layout", [("parallelism.pipeline=2", "schedule.microbatches=2"), ("parallelism.data=2",)])
def test_samples_are_those_of_the_whole_model(tmp_path: Path, layout: tuple[str, ...]) -> None:
    record, weights = thread_runs.result(tmp_path, *layout, words=WORDS)
    lines = [json.loads(line) for line in (tmp_path / "run" / record["artifacts"]["samples"]).read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(step, each) for step in (2, 4) for each in PROMPTS]
    for line in lines[len(PROMPTS) :]:
        assert line["sample"] == written_by_one(weights, line["prompt"])


def test_a_prompt_of_text_needs_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=gpt", "data=random_tokens", "callbacks=samples", "trainer.val_every=2"]) == 2
    told = capsys.readouterr().err
    assert "callbacks.samples.kwargs" in told
    assert "there is no tokenizer: name its folder, or give lists of token ids" in told
    assert list(tmp_path.iterdir()) == []


def test_prompts_and_samples_are_texts_with_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    samples = Samples(["the cat"], tokenizer=str(tokenizer_folder(tmp_path)), length=8)
    ids = samples._ids("the cat")
    tokenizer: Any = samples._tokenizer
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["the", "cat"]
    assert ids[-1] != tokenizer.eos_token_id, "the model goes on, so that no end stands after the prompt"
