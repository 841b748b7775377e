"""How the two matrices of an adapter are divided beside the weight that they belong to.

PEFT's layer gives ``base_layer(x) + lora_B(lora_A(dropout(x))) * scale``. Where ranks have some of the output features,
the second matrix is divided as the weight is, and the first is whole, which makes the same few features on every rank.
Where they have some of the input features, the first matrix is divided, and the ranks sum the few features that it
makes. So each matrix has its whole gradient on the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from runner.model.sharded.group import ShardGroup, group_of
from runner.model.sharded.operators import drawn_apart
from runner.model.sharded.wrap import ShardedModule, become

__all__ = ["DRAWS", "divide_draws", "has_adapter", "ways_beside"]

_BASE, _FIRST, _SECOND, _DROPOUT = "base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default"


def has_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer with PEFT's two matrices beside it."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def ways_beside(module: nn.Module, style: str) -> Mapping[str, str]:
    """How the modules in a layer with an adapter are divided, by their names in it.

    Args:
        module: the layer.
        style: how it would be divided without the adapter.
    """
    kind = style.partition(":")[0]
    if not isinstance(getattr(module, _BASE, None), nn.Embedding):
        if kind in ("column", "packed_column", "column_gathered"):
            return {_BASE: style, _SECOND: style, _DROPOUT: "drawn_together"}
        if kind == "row":
            return {_BASE: style, _FIRST: style, _DROPOUT: "drawn_apart"}
        if kind == "row_whole_input":
            return {_BASE: style, _FIRST: style}
    return {_BASE: "whole" if kind == "embedding" else style}  # a table's adapter reads rows of its own


class _Together(ShardedModule):
    """A dropout of a value that all ranks have, while they draw numbers of their own."""

    def forward(self, value: Tensor) -> Any:
        group_of(self.shard_group).draw_together()
        return super().forward(value)  # type: ignore[misc]


class _Apart(ShardedModule):
    """A dropout of this rank's own features, while the ranks draw the same numbers."""

    def forward(self, value: Tensor) -> Any:
        return drawn_apart(self.shard_group, super().forward, value)  # type: ignore[misc]


DRAWS: Mapping[str, type[ShardedModule]] = {"drawn_together": _Together, "drawn_apart": _Apart}
"""The dropouts beside divided weights, by their ways."""


def divide_draws(module: nn.Module, style: str, group: ShardGroup) -> None:
    """Let an adapter's dropout draw as its way says. One without a rate draws nothing, and stays as it is."""
    if isinstance(module, nn.Dropout) and not isinstance(module, ShardedModule):
        become(module, DRAWS[style], group)
