"""Rules of ``embedding``: its keys, and what it cannot be combined with."""

from __future__ import annotations

from runner.config.rules.table import Row, Table
from runner.config.rules.values import at_least, belongs
from runner.config.schema import EmbeddingConfig, RunConfig

__all__ = ["EMBEDDINGS", "EMBEDDING_TABLES"]

EMBEDDINGS = ("dense", "tensor_train")
_KEYS = ("rank", "factors", "targets")


def _belongs(key: str) -> Row[RunConfig]:
    usual = getattr(EmbeddingConfig(), key)
    return belongs(f"embedding.{key}", "embedding=tensor_train", fix=f"embedding.{key}={usual}")


_DENSE: Table[RunConfig] = Table(
    "Keys of tables that are no tensor trains",
    tuple(map(_belongs, _KEYS)),
    applies=lambda c: c.embedding.name == "dense",
)
_TRAINS: Table[RunConfig] = Table(
    "Tensor trains",
    (
        at_least("embedding.rank", 1),
        at_least("embedding.factors", 2),
        Row(
            "model.pretrained",
            lambda c: c.model.pretrained is not None,
            "must be null with embedding=tensor_train",
            "The file has the tables themselves, and no cores",
            fix="embedding=dense",
        ),
        Row(
            "adapter.name",
            lambda c: c.adapter.name != "none",
            "must be none with embedding=tensor_train",
            "An adapter freezes all other weights, of which cores have no pretrained values",
            fix="adapter=none",
        ),
    ),
    applies=lambda c: c.embedding.name == "tensor_train",
)

EMBEDDING_TABLES: tuple[Table[RunConfig], ...] = (_DENSE, _TRAINS)
"""All tables of this file, in the order in which they are checked."""
