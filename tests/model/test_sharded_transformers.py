"""Models of transformers, unmodified, on ranks that divide what the finder finds in them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from found_shards import Compared, compared, count
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
BIGCODE = {**GPT2, "n_inner": 64}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 67, "max_seq_len": 32}
NEO = {**SIZES, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], **TOKENS}
EQUAL_HEADS = {**SIZES, "num_key_value_heads": 4}


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
    ("Qwen3", {**EQUAL_HEADS, "head_dim": 8}, 4, 2),  # two norms of heads
    ("Falcon", {**SIZES, "multi_query": False, **TOKENS}, 1, 2),
    ("Mpt", MPT, 2, 2),
    ("StableLm", EQUAL_HEADS, 2, 2),
    ("Granite", EQUAL_HEADS, 2, 2),
    ("GPTNeo", NEO, 2, 2),
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
        assert divided_share(model, result) >= 0.5


# Entries of a block: with Apertus, those of two norms of heads and of two numbers that its activation learns, too.


def divided_share(model: nn.Module, result: Compared) -> float:
    """The share of a model's weights that ranks divide."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes[name] for name in result.divided.shards) / sum(sizes.values())


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


# What of the attention stays whole, and why; and the least share of the weights that ranks divide.
OF_MLPS = [
    # It adds a number for each head, which is no weight, to scores of which batch and heads are merged.
    ("Bloom", BLOOM, 4, {"self_attention.query_key_value": "", "self_attention.dense": ""}, 0.5),
    # One head of keys and values is packed behind all queries, which read it.
    ("GPTBigCode", BIGCODE, 2, {"attn.c_attn": "attention over a divided head", "attn.c_proj": "which is whole"}, 0.48),
    ("Falcon", {**SIZES, **TOKENS}, 2, {"self_attention.query_key_value": "", "self_attention.dense": ""}, 0.5),
    # Its keys and values, packed behind the queries, are fewer than these.
    (
        "Phi3",
        {**EQUAL_HEADS, "num_key_value_heads": 2, "pad_token_id": 0},
        2,
        {"self_attn.qkv_proj": "takes the divided features apart", "self_attn.o_proj": "which is whole"},
        0.45,
    ),
    # Its norms are of all heads' features together.
    (
        "Olmo2",
        {**EQUAL_HEADS, **TOKENS},
        2,
        {f"self_attn.{name}_proj": "mean over the divided features" for name in "qko"} | {"self_attn.v_proj": ""},
        0.48,
    ),
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "sizes", "degree", "whole", "least"), OF_MLPS, ids=[each[0] for each in OF_MLPS])
def test_of_some_the_feed_forward_layers_are_divided(
    name: str, sizes: dict[str, Any], degree: int, whole: dict[str, str], least: float
) -> None:
    model = made(name, sizes)
    result = compared(model, torch.randint(3, 67, (3, 8)), degree, cut=True)
    assert result.error < (1e-6 if name == "Bloom" else EQUAL)  # Bloom's softmax computes with 32 bits
    assert result.forward == result.backward == ["all_reduce"] * 2
    left = {each.name: each.reason for each in result.divided.left if re.search(r"\.(h|layers)\.", each.name)}
    assert {key.split(".", 4)[4].removesuffix(".weight") for key in left} == set(whole)
    assert all(whole[key.split(".", 4)[4].removesuffix(".weight")] in reason for key, reason in left.items())
    assert divided_share(model, result) >= least
