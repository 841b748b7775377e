"""Errors of layers that ranks divide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.profiling.layer_error import about_layer, refusing


@pytest.mark.parametrize(
    ("sizes", "degree", "text"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 8}, 8, "Its 4 heads of keys and values cannot be divided"),
        ({"num_attention_heads": 6}, 4, "Its 6 heads of attention cannot be divided by 4. Try parallelism.tensor=2"),
        ({"num_attention_heads": 8}, 4, "it raised RuntimeError: shape: its code may count on features, or heads"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_divided_are_named(sizes: dict[str, int], degree: int, text: str) -> None:
    attention = nn.Linear(2, 2)
    attention.config, attention.shard_group = SimpleNamespace(**sizes), "a group"  # type: ignore[assignment]
    config = resolve(["model=gpt", f"parallelism.tensor={degree}"])
    with pytest.raises(RequestError) as refused, refusing(config), about_layer(0, attention, None):
        raise RuntimeError("shape")
    assert text in refused.value.problems[0].line()
