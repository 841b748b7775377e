"""Packed and padded text has one loss per token, no packed sequence sees another, and stages agree with one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import text_file, tokenizer_folder
from torch import Tensor
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.model.load import load_model
from runner.zoo.losses import token_cross_entropy
from runner.zoo.text import build, collate

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48},
    "mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


def model_of(kind: str) -> Any:
    from runner.zoo.huggingface import build as model

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **KINDS[kind]}
    return model(model_type=kind, **sizes).eval()


def rows(tmp_path: Path, folder: Path, layout: str) -> Any:
    path = text_file(tmp_path)
    return build(path=str(path), tokenizer=str(folder), length=48, layout=layout)[0]


def batches(data: Any, size: int) -> Iterator[tuple[Any, Tensor]]:
    for first in range(0, len(data), size):
        yield collate([data[number] for number in range(first, min(first + size, len(data)))])


def logits_of(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return found


def loss_per_token(model: Any, data: Any, size: int) -> tuple[float, int]:
    """By (sum, weight), as the engine adds it up."""
    total, weight = 0.0, 0
    for inputs, targets in batches(data, size):
        part, count = token_cross_entropy(logits_of(model, inputs), targets)
        total, weight = total + float(part.double()), weight + int(count)
    return total / weight, weight


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_rows_have_one_loss_per_token(kind: str, tmp_path: Path, folder: Path) -> None:
    model = model_of(kind)
    packed, padded = (rows(tmp_path, folder, layout) for layout in ("packed", "padded"))
    loss, weight = loss_per_token(model, packed, 3)
    for size in (1, 4):
        other, count = loss_per_token(model, padded, size)
        assert count == weight
        assert other == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_one_sequence_leaves_the_losses_of_the_others(kind: str, tmp_path: Path, folder: Path) -> None:
    model = model_of(kind)
    data = rows(tmp_path, folder, "packed")
    inputs, targets = collate([data[0]])
    begins = torch.nonzero(inputs["position_ids"][0] == 0).flatten().tolist()
    assert len(begins) > 2
    part = slice(begins[1], begins[2])
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, part] = (changed["input_ids"][0, part] + 5) % 300
    one, other = (
        functional.cross_entropy(logits_of(model, each)[0], targets[0], reduction="none") for each in (inputs, changed)
    )
    assert not torch.equal(one[part], other[part])
    one[part] = other[part] = 0
    assert torch.equal(one, other)


def test_a_model_that_would_mix_packed_sequences_is_refused() -> None:
    """OPT takes positions, and makes its mask without them; Bloom takes none; Mamba's state goes on and on."""
    from runner.zoo.huggingface import build as model

    sizes: dict[str, Any] = {**SIZES, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    of_mamba = {key: value for key, value in sizes.items() if key != "num_attention_heads"}
    kinds = {"opt": {**sizes, "word_embed_proj_dim": 32}, "bloom": sizes, "mamba": of_mamba}
    ids, positions = torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 1]])
    for kind, own in kinds.items():
        with pytest.raises(ValueError, match="data.kwargs.layout=padded"):
            model(model_type=kind, **own)(ids, position_ids=positions)


def request(tmp_path: Path, folder: Path, layout: str) -> list[str]:
    sizes = {**SIZES, **KINDS["llama"]}
    words = [f"{'+' if key in KINDS['llama'] else ''}model.kwargs.{key}={value}" for key, value in sizes.items()]
    words += ["model=huggingface", "model.kwargs.model_type=llama", "logger=none", "trainer.progress=false"]
    words += ["data=text", f"data.kwargs.path={text_file(tmp_path)}", f"data.kwargs.tokenizer={folder}", "device=cpu"]
    return [*words, "data.kwargs.length=48", f"data.kwargs.layout={layout}", "data.batch_size=4"]


@pytest.mark.costly
def test_stages_tell_packed_sequences_apart(tmp_path: Path, folder: Path) -> None:
    """Traced layers, one after the other, as the stages of a pipeline run them."""
    inputs, targets = collate([rows(tmp_path, folder, "packed")[number] for number in range(2)])
    begins = torch.nonzero(inputs["position_ids"][0] == 0).flatten().tolist()
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, begins[1] : begins[2]] = 7
    found = []
    for pipeline in (1, 2):
        layers = load_model(resolve([*request(tmp_path, folder, "packed"), f"parallelism.pipeline={pipeline}"])).layers
        assert (len(layers) > 1) == (pipeline > 1)
        functions = [layer.calling(layer.build().eval()) for layer in layers]
        for value in (inputs, changed):
            with torch.no_grad():
                for function in functions:
                    value = function(value)
            found.append(value)
    whole, _, staged, other = found
    torch.testing.assert_close(staged, whole)
    is_changed = torch.zeros(targets.shape, dtype=torch.bool)
    is_changed[0, begins[1] : begins[2]] = True
    assert not torch.equal(staged[is_changed], other[is_changed])
    assert torch.equal(staged[~is_changed], other[~is_changed])
