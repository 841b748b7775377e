"""Rules, or a plan of transformers, that divide layers wrongly are refused by a first batch; right ones are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.profiling.model import profile_model
from runner.training.first_batches import first_batches
from runner.training.try_parts import try_parts

HERE = "test_try_parts"
WIDTH, HEAD, TOKENS = 16, 4, 13


class Block(nn.Module):
    """Attention whose heads of queries have as many, or one, head of keys and values, and a norm of each head."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        width = HEAD if shared else WIDTH
        self.norm, self.query, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value, self.each = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width), nn.LayerNorm(HEAD)

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.norm(hidden)
        parts = (each(given).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value))
        query, key, value = parts
        key, value = (part.expand(-1, query.shape[1], -1, -1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(self.each(query), key, value)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Planned(Block):
    """Brings the rules itself, and forgets one."""

    def __init__(self) -> None:
        super().__init__(shared=False)

    @staticmethod
    def tensor_plan() -> dict[str, str]:
        return {"query": "column", "key": "column", "value": "column", "out": "row"}


def plain(shared: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), Block(shared=shared), nn.Linear(WIDTH, TOKENS))


def planned() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), Planned(), nn.Linear(WIDTH, TOKENS))


def llama(way: str) -> Any:
    """A Llama with another way of the norms before attention in its plan."""
    sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1}
    config: Any = AutoConfig.for_model("llama", num_attention_heads=4, max_position_embeddings=8, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.input_layernorm": way}
    return model


def logits_loss(output: Any, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), tokens.flatten())


def data() -> TensorDataset:
    ids = torch.randint(TOKENS, (16, 7), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def tried(model: str, rules: str, *words: str) -> None:
    named = [f"model.target={HERE}:{model}", f"data.target={HERE}:data", "loss=token_cross_entropy", "device=cpu"]
    asked = [f"parallelism.sharding={{{rules}}}"] if rules else []
    config = resolve([*named, "data.batch_size=8", "parallelism.tensor=2", *asked, *words])
    try_parts(config, profile_model(config), first_batches(config).training)


HEADS = "*.query: column, *.key: column, *.value: column, *.out: row"


@pytest.mark.parametrize("words", [(), ("parallelism.tensor=4",), ("precision=bf16_mixed",)])
def test_right_rules_are_taken(words: tuple[str, ...]) -> None:
    tried("plain", f"{HEADS}, *.each: partial", *words)


@pytest.mark.parametrize(
    ("model", "rules", "weight"),
    [
        ("plain", HEADS, r"1\.each\.(weight|bias)"),
        ("planned", "", r"1\.each\.(weight|bias)"),
        ("plain", "*.query: column, *.out: row, *.each: partial", r"1\.(norm|key|value)\.(weight|bias)"),
    ],
)
def test_rules_that_leave_a_sum_out_are_refused(model: str, rules: str, weight: str) -> None:
    shared = ("model.kwargs.shared=true",) if "key" not in rules and rules else ()
    with pytest.raises(RequestError, match=rf"must give the gradients of the whole model.*that of ({weight}) is off"):
        tried(model, rules, *shared)


def test_keys_of_all_heads_take_gradients_of_all_ranks_before_them() -> None:
    """``partial`` adds up the gradients of the one head's own weights; those of the norm before it stay a part."""
    rules = "*.query: column, *.out: row, *.each: partial, *.key: partial, *.value: partial"
    with pytest.raises(RequestError, match=r"that of (0\.weight|1\.norm\.\w+) is off"):
        tried("plain", rules, "model.kwargs.shared=true")


OF_TRANSFORMERS = (f"loss.target={HERE}:logits_loss", "model.kwargs.way=replicated_with_grad_allreduce")


@pytest.mark.costly
def test_a_right_plan_of_transformers_is_taken() -> None:
    tried("llama", "", *OF_TRANSFORMERS, "model.kwargs.way=replicate")


def test_a_plan_of_transformers_that_adds_up_whole_gradients_is_refused() -> None:
    with pytest.raises(RequestError, match=r"input_layernorm\.weight is off by 100%.*Try parallelism\.sharding=\{\}"):
        tried("llama", "", *OF_TRANSFORMERS)


@pytest.mark.costly
def test_what_traces_show_takes_the_place_of_a_wrong_plan() -> None:
    tried("llama", "", *OF_TRANSFORMERS, "parallelism.sharding={}")
