"""Sizes of transformers' models that a request names alike for all of them."""

from __future__ import annotations

import pytest

from runner.zoo.huggingface import configuration


@pytest.mark.parametrize("model_type", ["bloom", "t5", "llama"])
def test_positions_are_limited_where_an_architecture_limits_them(model_type: str) -> None:
    made = configuration(model_type, fields={"max_position_embeddings": 64, "hidden_size": 32})
    assert made.hidden_size == 32
    assert getattr(made, "max_position_embeddings", None) == (64 if model_type == "llama" else None)


def test_other_sizes_that_an_architecture_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="BloomConfig has no rope_theta"):
        configuration("bloom", fields={"max_position_embeddings": 64, "rope_theta": 1e4})


@pytest.mark.parametrize("fields", [{"hidden_size": 128, "n_embd": 32}, {"n_embd": 32, "hidden_size": 128}])
def test_two_names_of_one_size_are_refused_if_they_differ(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"n_embd = 32.* two names of one field of GPT2Config: set \w+ alone"):
        configuration("gpt2", fields=fields)
    assert configuration("gpt2", fields=dict.fromkeys(fields, 32)).hidden_size == 32
