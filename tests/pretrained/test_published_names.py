"""The published layout of ruDALL-E's weights fits ``model=rudalle_malevich`` by the recipe's map of names."""

from __future__ import annotations

import json
import math
from itertools import accumulate, pairwise
from pathlib import Path

from runner.config.compose.resolve import resolve
from runner.model.check_pretrained import pretrained_problems

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


def save_zeros(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of float32 zeros, of which only the header takes room on the disk."""
    ends = list(accumulate((4 * math.prod(shape) for shape in shapes.values()), initial=0))
    places = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": place}
        for (name, shape), place in zip(shapes.items(), pairwise(ends), strict=True)
    }
    header = json.dumps(places).encode()
    with open(file, "wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + ends[-1])


def test_the_published_layout(tmp_path: Path) -> None:
    save_zeros(tmp_path / "weights.safetensors", published())
    names = ROOT / "recipes/rudalle/published_names.yaml"
    request = ["model=rudalle_malevich", *SMALL, f"model.pretrained={tmp_path / 'weights.safetensors'}"]
    assert pretrained_problems(resolve([*request, f"model.pretrained_names={names}"])) == []
    assert len(pretrained_problems(resolve(request))) > 20
