"""The tables as Markdown and CSV, from the document that a run leaves as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["heading", "markdown", "markdown_table", "replace_block", "to_csv"]

_MISSING = ""
_MORE = 1.005  # above it something is extra


def markdown(document: Mapping[str, Any]) -> str:
    """Everything, as it stands in the README."""
    settings = document["settings"]
    bubbles = [_bubbles(ranks, rows, settings) for ranks, rows in document["bubbles"].items()]
    parts = [heading(document), *bubbles, _memory(document["memory"], settings)]
    parts += [_extra(document["memory"], settings), _conditions(document["rows"])]
    return "\n\n".join(parts)


def heading(document: Mapping[str, Any]) -> str:
    """Where and when it was measured, and how busy the machine was with other work just before."""
    hardware, versions = document["hardware"], document["versions"]
    return (
        f"{document['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores, Python {versions['python']}, "
        f"torch {versions['torch']}, DeepSpeed {versions['deepspeed']}, commit {str(document['commit'])[:10]}. "
        f"Load of the machine before the start: {document['load_before']:.1f}."
    )


def _bubbles(ranks: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Idle / total of one number of ranks."""
    title = (
        f"**Bubble, idle / total, D = {ranks}, T = {settings['microbatches']}**; measured with "
        f"{1000 * settings['seconds']:g} ms for F, for I and for W"
    )
    header = ("schedule", "survey", "formula", "simulated", "measured", "in a row: simulated", "measured")
    lines = [
        (
            row["label"],
            row["printed_bubble"],
            _ratio(row["formula"]),
            _ratio(row["simulated"]),
            _ratio(row.get("measured")),
            _ratio(row["simulated_in_a_row"]),
            _ratio(row.get("measured_in_a_row")),
        )
        for row in rows
    ]
    return f"{title}\n\n{markdown_table(header, lines)}"


def _memory(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Bytes on the rank that holds most, and the weights of the first."""
    title = f"**Memory of the fullest rank, D = {settings['memory_ranks']}, T = {settings['microbatches']}**"
    header = (
        *("schedule", "survey", "formula / Ma", "simulated / Ma", "formula, MB", "predicted, MB", "measured, MB"),
        *("weights: formula, MB", "predicted", "measured"),
    )
    lines = [
        (
            row["label"],
            row["printed_activations"],
            _count(row["formula_activations"]),
            _count(row["simulated_activations"]),
            _megabytes(row["formula"]),
            *(_megabytes(_of(row.get(key), "activations")) for key in ("predicted", "measured")),
            _megabytes([row["formula_weights"]]),
            *(_megabytes(_of(row.get(key), "weights")) for key in ("predicted", "measured")),
        )
        for row in rows
    ]
    return f"{title}\n\n{markdown_table(header, lines)}"


def _extra(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """What a step takes besides activations, over that of the survey's baseline, beside the survey's ticks."""
    title = (
        f"**Over naive, D = {settings['memory_ranks']}, T = {settings['microbatches']}, all ranks together**: bytes of "
        "weights, FLOPs of a step, bytes sent in it; and whether that confirms the survey's tick or its absence"
    )
    header = ("schedule", "weights", "survey", "FLOPs", "survey", "sent", "survey")
    first = rows[0].get("measured")
    lines = []
    for row in rows:
        cells = []
        for key, tick in zip(("weights", "flops", "sent"), row["ticks"] or (None,) * 3, strict=True):
            ratio = _total(row.get("measured"), key) / _total(first, key) if first and row.get("measured") else None
            cells += [_ratio(ratio), _verdict(tick, ratio, decides=key not in row["undecided"])]
        lines.append((row["label"], *cells))
    return f"{title}\n\n{markdown_table(header, lines)}"


def _total(ranks: Sequence[Mapping[str, Any]] | None, key: str) -> float:
    return float(sum(rank[key] for rank in ranks or ()))


def _verdict(tick: bool | None, ratio: float | None, *, decides: bool) -> str:
    """The survey's tick (yes or no), and what the count says of it."""
    if tick is None:
        return _MISSING
    said = "yes" if tick else "no"
    if not decides:
        return f"{said}: not decided here"
    return said if ratio is None else f"{said}: {'confirmed' if tick == (ratio > _MORE) else 'contradicted'}"


def _conditions(rows: Sequence[Mapping[str, Any]]) -> str:
    """When the printed and the closed forms hold."""
    lines = [f"- `{row['label']}`: {row['condition']}" for row in rows]
    return "\n".join(["**When the formulas hold**", "", *lines])


def to_csv(document: Mapping[str, Any]) -> str:
    """One line per schedule and number of ranks; lists by rank are joined by blanks, bytes are whole."""
    memory = {row["label"]: row for row in document["memory"]}
    settings = document["settings"]
    text = io.StringIO()
    columns = (
        *("ranks", "microbatches", "schedule", "bubble_printed", "bubble_formula", "bubble_simulated"),
        *("bubble_measured", "bubble_in_a_row_simulated", "bubble_in_a_row_measured", "activations_printed"),
        *("activations_formula_bytes", "activations_predicted_bytes", "activations_measured_bytes"),
        *("weights_formula_bytes", "weights_predicted_bytes", "weights_measured_bytes"),
    )
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for ranks, rows in document["bubbles"].items():
        for row in rows:
            held = memory[row["label"]] if int(ranks) == settings["memory_ranks"] else {}
            times = (row["formula"], row["simulated"], row.get("measured"))
            in_a_row = (row["simulated_in_a_row"], row.get("measured_in_a_row"))
            writer.writerow(
                [
                    *(ranks, settings["microbatches"], row["label"], row["printed_bubble"], *times, *in_a_row),
                    *(row["printed_activations"], _joined(held.get("formula"))),
                    *(_joined(_of(held.get(key), "activations")) for key in ("predicted", "measured")),
                    held.get("formula_weights"),
                    *(_joined(_of(held.get(key), "weights")) for key in ("predicted", "measured")),
                ]
            )
    return text.getvalue()


def replace_block(readme: Path, name: str, content: str) -> None:
    """Put ``content`` between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: the file has no such lines.
    """
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    text = readme.read_text(encoding="utf-8")
    before, found, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not found or not end:
        raise ValueError(f"{readme} has no lines {first.strip()} and {last}")
    readme.write_text(f"{before}{first}\n{content}\n\n{last}{after}", encoding="utf-8")


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of these cells."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ratio(value: float | None) -> str:
    return _MISSING if value is None else f"{abs(value) if abs(value) < 5e-4 else value:.3f}"


def _count(values: Sequence[float] | None) -> str:
    """The most of any rank."""
    return _MISSING if values is None else f"{max(values):g}"


def _megabytes(values: Sequence[float] | None) -> str:
    return _MISSING if values is None else f"{max(values) / 1e6:.3f}"


def _of(ranks: Sequence[Mapping[str, int]] | None, what: str) -> list[int] | None:
    return None if ranks is None else [rank[what] for rank in ranks]


def _joined(values: Sequence[float] | None) -> str:
    return _MISSING if values is None else " ".join(map(str, values))
