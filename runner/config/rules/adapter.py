"""Rules of ``adapter``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from runner.config.rules.table import Row, Table
from runner.config.rules.values import at_least, belongs, positive
from runner.config.schema import RunConfig

__all__ = ["ADAPTERS", "ADAPTER_TABLES"]

ADAPTERS = ("none", "lora")
_KEYS = ("rank", "alpha", "dropout", "targets")


_WITHOUT: Table[RunConfig] = Table(
    "Keys without an adapter",
    tuple(belongs(f"adapter.{key}", "adapter=lora", fix="adapter=lora") for key in _KEYS),
    applies=lambda c: c.adapter.name == "none",
)
_WITH: Table[RunConfig] = Table(
    "Adapters",
    (
        at_least("adapter.rank", 1),
        positive("adapter.alpha", "16"),
        Row(
            "adapter.dropout",
            lambda c: not 0 <= c.adapter.dropout < 1,
            "must lie in [0, 1)",
            fix="adapter.dropout=0",
        ),
    ),
    applies=lambda c: c.adapter.name == "lora",
)

ADAPTER_TABLES: tuple[Table[RunConfig], ...] = (_WITHOUT, _WITH)
"""All tables of this file, in the order in which they are checked."""
