"""Rules of ``adapter``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from runner.config.rules.table import Row, Table, value_at
from runner.config.rules.values import at_least, positive
from runner.config.schema import AdapterConfig, RunConfig

__all__ = ["ADAPTERS", "ADAPTER_TABLES"]

ADAPTERS = ("none", "lora")
_KEYS = ("rank", "alpha", "dropout", "targets")


def _belongs(key: str) -> Row[RunConfig]:
    path, usual = f"adapter.{key}", getattr(AdapterConfig(), key)
    return Row(path, lambda c: value_at(c, path) != usual, "belongs to adapter=lora", fix="adapter=lora")


_WITHOUT: Table[RunConfig] = Table(
    "Keys without an adapter", tuple(map(_belongs, _KEYS)), applies=lambda c: c.adapter.name == "none"
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
