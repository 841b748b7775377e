"""The published layout of ruDALL-E's weights fits ``model=rudalle_malevich`` by the recipe's map of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.model.check_pretrained import pretrained_problems
from runner.model.pretrained import weights
from runner.model.pretrained.stored import StoredTensor

ROOT = Path(__file__).resolve().parents[2]
WIDTH, TEXT, IMAGE = 32, 64 + 128, 48
SMALL = ["model.kwargs.width=32", "model.kwargs.heads=2", "model.kwargs.text_vocab=64", "model.kwargs.image_vocab=48"]


def published() -> dict[str, tuple[int, ...]]:
    """Names and shapes as ai-forever/ru-dalle saves them, of narrower layers."""
    found: dict[str, tuple[int, ...]] = {
        "text_embeddings.weight": (TEXT, WIDTH), "image_embeddings.weight": (IMAGE, WIDTH),
        "text_pos_embeddings.weight": (129, WIDTH), "image_row_embeddings.weight": (32, WIDTH),
        "image_col_embeddings.weight": (32, WIDTH), "to_logits.1.weight": (TEXT + IMAGE, WIDTH),
        "to_logits.1.bias": (TEXT + IMAGE,),
    }  # fmt: skip
    norms = ["to_logits.0", "transformer.final_layernorm"]
    for layer in range(24):
        start = f"transformer.layers.{layer}"
        norms += [f"{start}.{name}" for name in ("input_layernorm", "before_first_addition_layernorm")]
        norms += [f"{start}.{name}" for name in ("post_attention_layernorm", "before_second_addition_layernorm")]
        for name, outputs, inputs in (
            ("attention.query_key_value", 3 * WIDTH, WIDTH),
            ("attention.dense", WIDTH, WIDTH),
            ("mlp.dense_h_to_4h", 4 * WIDTH, WIDTH),
            ("mlp.dense_4h_to_h", WIDTH, 4 * WIDTH),
        ):
            found |= {f"{start}.{name}.weight": (outputs, inputs), f"{start}.{name}.bias": (outputs,)}
    found |= {f"{name}.{part}": (WIDTH,) for name in norms for part in ("weight", "bias")}
    return found | {f"transformer.{name}_mask": (1152, 1152) for name in ("row", "col", "conv")}


def test_the_published_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {name: StoredTensor(Path("a"), name, shape, "F32") for name, shape in published().items()}
    monkeypatch.setattr("runner.model.check_pretrained.stored_tensors", lambda path: stored)
    monkeypatch.setattr(weights, "stored_tensors", lambda path: stored)
    names = ROOT / "recipes/rudalle/published_names.yaml"
    request = ["model=rudalle_malevich", *SMALL, "model.pretrained=weights.safetensors"]
    assert pretrained_problems(resolve([*request, f"model.pretrained_names={names}"])) == []
    assert len(pretrained_problems(resolve(request))) > 20
