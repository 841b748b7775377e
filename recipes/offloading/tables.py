"""Markdown of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.recipes.schedules.tables import markdown_table

__all__ = ["markdown"]

_HEADER = (
    "link", "strategy", "fits", "layers moved", "forwards again", "peak, predicted", "counted", "moved, predicted",
    "counted", "time, predicted", "measured",
)  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    """A table for each model."""
    heading = f"{document['machine']}, torch {document['torch']}, {document['date']}."
    return "\n\n".join([heading, *(_model(name, found) for name, found in document["models"].items())])


def _model(name: str, found: Mapping[str, Any]) -> str:
    title = (
        f"### {name}: {found['layers']} layers, plain peak {found['plain_bytes']:,} bytes, limit {found['budget']:,}"
    )
    rows = [[f"{float(link) / 1e9:g} GB/s", *_cells(row)] for link, rows in found["links"].items() for row in rows]
    return f"{title}\n\n{_table(rows, timed=bool(found['steps']))}"


def _table(rows: Sequence[Sequence[str]], *, timed: bool) -> str:
    columns = len(_HEADER) if timed else len(_HEADER) - 1
    return markdown_table(_HEADER[:columns], [row[:columns] for row in rows])


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"`{row['strategy']}`",
        "yes" if row["fits"] else "no",
        str(row["moved_layers"]),
        str(row["forwards_again"]),
        *(f"{row[key]:,}" for key in ("predicted_bytes", "measured_bytes", "predicted_moved", "measured_moved")),
        f"{row['predicted_time']:.3f}",
        f"{row.get('measured_time', 0.0):.3f}",
    ]
