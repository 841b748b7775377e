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
