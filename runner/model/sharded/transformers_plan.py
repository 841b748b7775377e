"""What the plans of transformers' models leave to others: packed maps, and activations that learn.

Plans of some models put the features together again behind a packed map, because the code takes queries, keys and
values apart at the numbers of heads that the configuration says, and gates and ups in the middle. A rank that has its
part of each of them in one weight, and is told its own number of heads, needs no exchange there.

An activation between two divided maps sees this rank's features alone, so that the ranks must sum the gradients of what
it learns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from runner.model.sharded.group import ShardGroup
from runner.model.sharded.wrap import ShardedModule, become

__all__ = ["HEADS", "completed", "divide_heads"]

HEADS = "heads"
"""The way of an attention that is told this rank's number of heads."""

_GATED = ("phi3", "glm", "glm4")  # gates, then ups
_ATTENDING = ("phi3",)  # queries, then keys, then values
_ACTIVATION, _BEHIND = ".act_fn", ".down_proj"
_MAPS = {"gate_up_proj": "down_proj", "qkv_proj": "o_proj"}


def completed(model: nn.Module, ways: Mapping[str, str], degree: int) -> dict[str, str]:
    """The ways of a plan, with packed maps and those behind them divided by blocks where ranks can do so, and with
    activations between divided maps.

    Args:
        model: the model of transformers whose plan it is.
        ways: patterns of names in the model, each with a way.
        degree: the number of ranks.
    """
    config: Any = model.config
    found = dict(ways)
    for pattern, way in ways.items():
        owner, _, name = pattern.rpartition(".")
        behind = f"{owner}.{_MAPS.get(name)}"
        if way != "column_gathered" or ways.get(behind) != "row_whole_input":
            continue
        if name == "gate_up_proj" and config.model_type in _GATED and config.intermediate_size % degree == 0:
            found |= {pattern: "packed_column:2", behind: "row"}
        if name == "qkv_proj" and config.model_type in _ATTENDING:
            heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
            if not any(each % degree for each in heads):
                found |= {pattern: f"packed_column:{':'.join(map(str, heads))}", behind: "row", owner: HEADS}
    return {**_activations(model, found), **found}


def _activations(model: nn.Module, ways: Mapping[str, str]) -> dict[str, str]:
    """The ways of activations with weights between divided maps, by name."""
    owners = [
        re.compile(re.escape(pattern.removesuffix(_BEHIND)).replace(r"\*", "[^.]+"))
        for pattern, way in ways.items()
        if pattern.endswith(_BEHIND) and way == "row"
    ]
    return {
        name: "partial"
        for name, each in model.named_modules()
        if name.endswith(_ACTIVATION)
        and any(True for _ in each.parameters())
        and any(owner.fullmatch(name.removesuffix(_ACTIVATION)) for owner in owners)
    }


class _Heads(ShardedModule):
    """An attention that has some of the heads."""


def divide_heads(module: nn.Module, group: ShardGroup) -> None:
    """Tell an attention, in place, how many heads it has on this rank."""
    if isinstance(module, ShardedModule):  # under a second name
        return
    own: Any = become(module, _Heads, group)
    own.config = copy.copy(own.config)
    own.config.num_attention_heads //= group.degree
    own.num_key_value_heads //= group.degree
