"""Models of transformers, unmodified, on ranks that divide what the finder finds in them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from found_shards import compared, count
from torch import Tensor, nn

from runner.model.traced.operators import trace

transformers = pytest.importorskip("transformers")

EQUAL = 1e-12
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 67,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 67, "n_positions": 32, "attn_pdrop": 0.0, **TOKENS}
OPT = {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 67}


class Logits(nn.Module):
    """A model's first output, without what it keeps for another call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, use_cache=False, return_dict=False)[0]


class Hidden(Logits):
    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, return_dict=False)[0]


def made(name: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = next(f"{name}{end}" for end in ("ForCausalLM", "LMHeadModel", "Model") if hasattr(transformers, name + end))
    if name == "Bert":
        return Hidden(transformers.BertModel(config, add_pooling_layer=False)).double()
    model = getattr(transformers, kind)(config).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm.__get__(module)  # its own one computes with 32 bits
    return Logits(model)


def _norm(self: Any, value: Tensor) -> Any:
    weight = self.weight if hasattr(self, "variance_epsilon") else 1.0 + self.weight
    epsilon = getattr(self, "variance_epsilon", None) or self.eps
    return weight * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon))


# Per block: the entries, that is the sums of the backward, and the sums of the forward.
DIVIDED = [
    ("GPT2", GPT2, 2, 2),
    ("OPT", OPT, 2, 2),
    ("Llama", SIZES, 2, 2),
    ("Bert", {**SIZES, "attention_probs_dropout_prob": 0.0}, 2, 2),
    ("Phi", SIZES, 1, 2),
    ("GPTNeoX", SIZES, 2, 2),
    ("Qwen3", {**SIZES, "num_key_value_heads": 4, "head_dim": 8}, 4, 2),  # two norms of heads
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "sizes", "entries", "sums"), DIVIDED, ids=[each[0] for each in DIVIDED])
def test_every_block_is_divided(name: str, sizes: dict[str, Any], entries: int, sums: int) -> None:
    model, tokens = made(name, sizes), torch.randint(3, 67, (3, 8))
    programs = trace(model, tokens, name)
    for degree in (2, 4):
        result = compared(model, tokens, degree, cut=True, programs=programs)
        assert result.error < EQUAL
        program = result.divided.programs[True]
        assert (count(program, "identity"), count(program, "all_reduce")) == (2 * entries, 2 * sums)
        assert (result.forward, result.backward) == (["all_reduce"] * 2 * sums, ["all_reduce"] * 2 * entries)
        assert not [each.name for each in result.divided.left if not re.search("embed|wte|wpe|lm_head", each.name)]
        assert len(result.cuts) >= 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2"])
def test_fewer_key_heads_than_ranks_stay_whole_with_their_queries(name: str) -> None:
    model, tokens = made(name, GROUPED), torch.randint(3, 67, (3, 8))
    programs = trace(model, tokens, name)
    both, mlp = (compared(model, tokens, degree, programs=programs) for degree in (2, 4))
    assert both.error < EQUAL
    assert mlp.error < EQUAL
    norms = 2 if name == "Qwen3" else 0
    assert [len(each) for each in (both.forward, both.backward, mlp.forward, mlp.backward)] == [2, 2 + norms, 1, 1]
    reasons = {each.name: each.reason for each in mlp.divided.left}
    assert "makes 2 of the features, which 4 does not divide" in reasons["model.model.layers.0.self_attn.k_proj.weight"]
    assert "k_proj.weight makes, which stays whole" in reasons["model.model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.costly
def test_of_bloom_the_feed_forward_layers_are_divided() -> None:
    """Its attention adds a number for each head, which is no weight, to scores of which batch and heads are merged."""
    result = compared(made("Bloom", BLOOM), torch.randint(3, 67, (3, 8)), 4, cut=True)
    assert result.error < 1e-6  # its attention's softmax computes with 32 bits
    assert result.forward == result.backward == ["all_reduce"] * 2
    assert {each.name.split(".", 4)[4] for each in result.divided.left if ".h." in each.name} == {
        "self_attention.query_key_value.weight",
        "self_attention.dense.weight",
    }
