"""Markdown of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["markdown"]


def markdown(document: Mapping[str, Any]) -> str:
    """A table of strategies and a line about the budgets for each model."""
    heading = f"{document['machine']}, torch {document['torch']}, {document['date']}."
    return "\n\n".join([heading, *(_model(name, found) for name, found in document["models"].items())])


def _model(name: str, found: Mapping[str, Any]) -> str:
    plain = found["plain_bytes"]
    rows = [[f"`{strategy}`", *_figures(row, plain)] for strategy, row in found["strategies"].items()]
    figure = f"![{name}: peak and FLOPs of every strategy](figures/{_slug(name)}.svg)"
    title = f"### {name}: {found['layers']} layers, plain peak {plain:,} bytes"
    budgets = (_budgets(strategy, rows, plain) for strategy, rows in found["budgets"].items())
    refused = (f"`activation_checkpoint={strategy}` is refused: {why}" for strategy, why in found["refused"].items())
    return "\n\n".join([title, _table(["strategy", *_HEADER], rows), *budgets, *refused, figure])


_HEADER = (
    "peak, predicted", "peak, counted", "of plain", "forwards again, predicted", "counted", "FLOPs, predicted",
    "counted",
)  # fmt: skip


def _figures(row: Mapping[str, Any], plain: int) -> list[str]:
    """The cells of :data:`_HEADER`."""
    peaks = [f"{row['predicted_bytes']:,}", f"{row['measured_bytes']:,}", f"{row['measured_bytes'] / plain:.3f}"]
    again = [str(row["predicted_forwards"]), str(row["measured_forwards"])]
    return [*peaks, *again, f"{row['predicted_flops']:.3f}", f"{row['measured_flops']:.3f}"]


def _budgets(strategy: str, rows: Sequence[Mapping[str, Any]], plain: int) -> str:
    """The table of a strategy that chooses under a budget."""
    kept = [row for row in rows if "measured_bytes" in row]
    missed = [row for row in rows if "measured_bytes" not in row]
    lines = [[f"{row['budget']:,}", row["strategy"], *_figures(row, plain)] for row in kept]
    least = f" The least that any of its programs takes is {missed[0]['least_bytes']:,} bytes." if missed else ""
    told = f"`activation_checkpoint={strategy}`, by the bytes that it may use.{least}"
    return f"{told}\n\n{_table(['limit', 'program', *_HEADER], lines)}"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
