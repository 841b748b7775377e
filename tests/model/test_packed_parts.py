"""Parts of weights that hold several maps of unequal lengths, and the ways that say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.model.sharded.plan import rules_of
from runner.model.sharded.transformers_plan import HEADS
from runner.model.sharded.values import Shard
from runner.model.sharded.wrap import why_not


@pytest.mark.parametrize("dim", [0, 1])
def test_each_part_has_its_own_of_every_block(dim: int) -> None:
    whole = torch.arange(16 * 3.0).view(16, 3) if dim == 0 else torch.arange(3 * 16.0).view(3, 16)
    rows = {0: [*range(4), 8, 9, 12, 13], 1: [*range(4, 8), 10, 11, 14, 15]}
    shards = [Shard(dim, index, 2, tuple(whole.shape), blocks=(8, 4, 4)) for index in range(2)]
    parts = [each.cut(whole) for each in shards]
    for index, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, torch.tensor(rows[index])))
        assert tuple(part.shape) == shards[index].shape == shards[index].bare_shape
    assert torch.equal(shards[1].join(parts), whole)
    assert not shards[0].is_plain
    with pytest.raises(ValueError, match="in blocks of"):
        Shard(dim, 0, 4, tuple(whole.shape), blocks=(8, 4, 2))


@pytest.mark.parametrize(("length", "degree"), [(32, 16), (36, 2)])
def test_blocks_of_unequal_lengths_must_be_divisible(length: int, degree: int) -> None:
    assert why_not(nn.Linear(8, 32), "packed_column:4:2:2", 4) is None
    told = f"Its {length} output features, as 4:2:2, cannot be divided by {degree}"
    assert why_not(nn.Linear(8, length), "packed_column:4:2:2", degree) == told


@pytest.mark.parametrize("kind", ["phi3", "glm"])
def test_packed_maps_of_transformers_are_divided_by_blocks(kind: str) -> None:
    """As far as heads and features can be divided; else the ranks put the features together, as its plan says."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layer = "model.layers.0"
    for degree, fits in ((2, True), (3, False)):
        rules = rules_of(model, degree=degree)
        assert rules is not None
        ways = ("packed_column:2", "row") if fits else ("column_gathered", "row_whole_input")
        assert ways == tuple(rules.style_of(f"{layer}.mlp.{each}") for each in ("gate_up_proj", "down_proj"))
        if kind == "phi3":
            ways = ("packed_column:4:2:2", "row") if fits else ways
            assert ways == tuple(rules.style_of(f"{layer}.self_attn.{each}") for each in ("qkv_proj", "o_proj"))
        assert (rules.style_of(f"{layer}.self_attn") == HEADS) == (fits and kind == "phi3")


def test_an_activation_that_learns_between_divided_maps_is_partial() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model("apertus", num_attention_heads=4, **sizes)
    rules = rules_of(transformers.AutoModelForCausalLM.from_config(config), degree=2)
    assert rules is not None
    assert rules.style_of("model.layers.0.mlp.act_fn") == "partial"
