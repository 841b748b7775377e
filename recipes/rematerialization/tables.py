"""Markdown of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["markdown"]


def markdown(document: Mapping[str, Any]) -> str:
    """Tables of the strategies without and with a budget for each model."""
    heading = f"{document['machine']}, torch {document['torch']}, {document['date']}."
    return "\n\n".join([heading, *(_model(name, found) for name, found in document["models"].items())])


def _model(name: str, found: Mapping[str, Any]) -> str:
    plain = found["plain_bytes"]
    timed = any("measured_seconds" in row for row in found["strategies"].values())
    header = ["strategy", *_HEADER, *(["time, measured"] if timed else [])]
    rows = [[f"`{strategy}`", *_figures(row, plain)] for strategy, row in found["strategies"].items()]
    figure = f"![{name}: peak and FLOPs of every strategy](figures/{_slug(name)}.svg)"
    title = f"### {name}: {found['layers']} layers, plain peak {plain:,} bytes"
    refused = (f"`activation_checkpoint={strategy}` is refused: {why}" for strategy, why in found["refused"].items())
    return "\n\n".join([title, _table(header, rows), *_budgets(found["budgets"], plain, timed=timed), *refused, figure])


_HEADER = (
    "peak, predicted", "peak, counted", "of plain", "forwards again, predicted", "counted", "FLOPs, predicted",
    "counted",
)  # fmt: skip


def _figures(row: Mapping[str, Any], plain: int) -> list[str]:
    """The cells of :data:`_HEADER`, and the time if it was measured."""
    peaks = [f"{row['predicted_bytes']:,}", f"{row['measured_bytes']:,}", f"{row['measured_bytes'] / plain:.3f}"]
    again = [str(row["predicted_forwards"]), str(row["measured_forwards"])]
    time = [_time(row)] if "measured_seconds" in row else []
    return [*peaks, *again, f"{row['predicted_flops']:.3f}", f"{row['measured_flops']:.3f}", *time]


def _budgets(budgets: Mapping[str, Sequence[Mapping[str, Any]]], plain: int, *, timed: bool) -> list[str]:
    """Tables of the strategies that choose under a budget: FLOPs, peaks and, if it was measured, time by limit."""
    if not budgets:
        return []
    limits = [f"{row['budget'] / plain:.2f}" for row in next(iter(budgets.values()))]
    header = ["strategy", *limits]

    def table(cell: Callable[[Mapping[str, Any]], str], last: str, of_all: Callable[..., str]) -> str:
        lines = [
            [f"`{name}`", *(cell(row) if "measured_bytes" in row else "-" for row in rows), of_all(rows)]
            for name, rows in budgets.items()
        ]
        return _table([*header, last], lines)

    texts = [
        "FLOPs as counted, by the limit as a part of the plain peak; - where no program is within it.",
        table(lambda row: f"{row['measured_flops']:.3f}", "least possible", lambda rows: _least(rows, plain)),
        "Peaks as counted, as parts of the plain peak, and by how many bytes predicted ones are above them.",
        table(lambda row: f"{row['measured_bytes'] / plain:.3f}", "predicted - counted", _errors),
    ]
    if timed:
        texts.append("Time as measured, as parts of the plain step's predicted one.")
        texts.append(table(_time, "predicted / measured", _ratio))
    return texts


def _least(rows: Sequence[Mapping[str, Any]], plain: int) -> str:
    """The least peak of any program, where a limit is below it."""
    missed = [row["least_bytes"] for row in rows if "least_bytes" in row]
    return f"{missed[0] / plain:.3f}" if missed else "-"


def _errors(rows: Sequence[Mapping[str, Any]]) -> str:
    found = [row["predicted_bytes"] - row["measured_bytes"] for row in rows if "measured_bytes" in row]
    return f"{min(found):,} to {max(found):,}" if found else "-"


def _time(row: Mapping[str, Any]) -> str:
    return f"{row['measured_seconds']:.3f}" if "measured_seconds" in row else "-"


def _ratio(rows: Sequence[Mapping[str, Any]]) -> str:
    """The least and the largest of predicted seconds, as parts of the measured."""
    found = [row["predicted_flops"] / row["measured_seconds"] for row in rows if "measured_seconds" in row]
    return f"{min(found):.3f} to {max(found):.3f}" if found else "-"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
