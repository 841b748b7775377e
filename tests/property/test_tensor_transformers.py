"""Models of transformers, divided as their own plans say, give with 64 bits what transformers gives in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from whole_runs import Run, peaks, train

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.run.prepare import prepare

transformers = pytest.importorskip("transformers")

_STEPS, _WORDS = 3, 19
_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": _WORDS,
    "max_position_embeddings": 8,
}  # fmt: skip
_HALF = {**_SIZES, "num_key_value_heads": 2}
_GROUPED = {**_HALF, "head_dim": 8}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": _GROUPED,  # with norms of heads
    "gemma2": {**_GROUPED, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},  # tied
    "gpt_neox": _SIZES,  # with packed queries, keys and values, and biases
    "mistral": _GROUPED,
    "olmo2": _SIZES,  # with norms of all heads together, for which ranks put queries and keys together
    "gptj": {**{key: value for key, value in _SIZES.items() if key != "intermediate_size"}, "rotary_dim": 4},
    "starcoder2": _HALF,  # tied, with biases
    "phi3": {
        **_HALF,
        "pad_token_id": 0,
    },  # with packed queries, keys and values of two lengths, and packed gates and ups
    "glm": {**_HALF, "head_dim": 8, "pad_token_id": 0},  # with packed gates and ups
    "cohere": _HALF,  # tied, with attention and feed-forward on one input
    "olmo": _HALF,  # with norms without weights
    "nemotron": _HALF,
    "helium": _GROUPED,
    "arcee": _HALF,
    "ernie4_5": _HALF,
    "apertus": _HALF,  # with norms of heads, and an activation that learns
}
_ROUND_TO_32_BITS = {*_KINDS} - {"gpt_neox", "gptj", "starcoder2", "nemotron"}
_OF_ATTENTION: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "bloom": (
        {"hidden_size": 32, "n_head": 4, "n_layer": 1, "vocab_size": _WORDS},
        "h.0.self_attention",
        ("query_key_value", "dense"),
    ),
    "gpt_bigcode": (  # with one head of keys and values for all of queries
        {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": _WORDS, "n_positions": 8},
        "h.0.attn",
        ("c_attn",),
    ),
    "falcon": (  # likewise
        {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": _WORDS},
        "h.0.self_attention",
        ("query_key_value", "dense"),
    ),
}
"""Sizes of models whose attention cannot be divided, its name, and those of its maps that are among the first told."""
_COMMON = (
    "model=huggingface", "data=custom", "data.target=tensor_models:data", f"+data.kwargs.tokens={_WORDS}",
    "loss=token_cross_entropy", "data.batch_size=8", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.5",
    "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null",
    f"trainer.max_steps={_STEPS}", "seed=3", "precision=fp64",
)  # fmt: skip


def sizes_of(kind: str, sizes: dict[str, Any]) -> list[str]:
    return [f"+model.kwargs.{key}={value}" for key, value in {**sizes, "model_type": kind}.items()]


def run(folder: Path, kind: str, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return train(resolve([*_COMMON, *sizes_of(kind, _KINDS[kind]), *overrides]), folder)


def plain(kind: str, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the parameters after the steps, of a loop over the model that transformers makes."""
    config = transformers.AutoConfig.for_model(kind, **_KINDS[kind])
    model: Any = transformers.AutoModelForCausalLM.from_config(config).double().train()
    model.load_state_dict(start, strict=not config.tie_word_embeddings)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for step in range(_STEPS):
        samples = [tensor_models.data(_WORDS)[8 * step + at] for at in range(8)]
        tokens, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        logits = model(tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.costly
@pytest.mark.parametrize("kind", _KINDS)
def test_it_is_divided_by_its_plan(kind: str, tmp_path: Path) -> None:
    """Norms of most of these models round to 32 bits in transformers, which may fall elsewhere; nothing else does."""
    run(tmp_path / "start", kind, "optimizer.lr=1e-30", "trainer.max_steps=1")
    losses, weights = plain(kind, load_file(tmp_path / "start" / "weights.safetensors"))
    made = run(tmp_path / "parts", kind, "parallelism.tensor=2", "parallelism.pipeline=2", "schedule.microbatches=2")
    rounding = 3e-7 if kind in _ROUND_TO_32_BITS else 1e-13
    assert made.losses == pytest.approx(losses, rel=rounding)
    found = load_file(tmp_path / "parts" / "weights.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=rounding, msg=name)
    own = {name: made.gradients[0][name][0] for name in weights}
    known = sum(value.numel() for value in weights.values())
    assert sum(value.numel() for name, value in weights.items() if own[name].shape != value.shape) >= known / 2
    elsewhere = sum(value.numel() - own[name].numel() for name, value in weights.items())
    assert made.plan.profile.parameters_elsewhere == elsewhere
    assert f"2 ranks divide {2 * elsewhere / known:.0%} of the weights, each has the others whole" in made.plan.advice
    for counted, predicted in peaks(made):
        assert 0.9 * predicted <= counted <= predicted
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent


@pytest.mark.costly
@pytest.mark.parametrize("kind", _OF_ATTENTION)
def test_the_plan_says_what_stays_whole(kind: str) -> None:
    """The finder divides the feed-forward layers of these models, and neither attention nor embedding."""
    sizes, attention, maps = _OF_ATTENTION[kind]
    common = ("model=custom", "model.target=runner.zoo.huggingface:build", *_COMMON[1:])
    plan = prepare(resolve([*common, *sizes_of(kind, sizes), "parallelism.tensor=2"]), place_is_made=True)
    (line,) = [each for each in plan.advice if each.startswith("2 ranks divide ")]
    assert re.fullmatch("2 ranks divide [567][0-9]% of the weights, each has the others whole: .*", line)
    for name in maps:
        assert f"transformer.{attention}.{name}.weight: " in line
    assert ".mlp." not in line


@pytest.mark.costly
@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (4, 8)])
def test_fewer_heads_of_keys_than_ranks_are_not_divided_by_a_plan(heads: int, ranks: int) -> None:
    sizes = sizes_of("llama", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": heads})
    told = f"Its {heads} heads of keys and values cannot be divided by {ranks}. Try parallelism.tensor={ranks // 2}"
    with pytest.raises(RequestError, match=re.escape(told)):
        prepare(resolve([*_COMMON, *sizes, f"parallelism.tensor={ranks}"]), place_is_made=True)
