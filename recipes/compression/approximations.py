"""The table of a sweep over approximate backwards and four-bit arithmetic: bytes at the peak, and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from runner.recipes.compression.figures import Curve, draw

__all__ = ["sweep_report"]

_LAST_STEPS = 20  # their mean is the loss


def sweep_report(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table and figure, for ``runner report``.

    Args:
        runs: of each job its ``directory`` and its ``record``.
    """
    records = [run["record"] for run in runs]
    ended = [record for record in records if record["status"] == "ok"]
    plain = next((record for record in ended if _names(record) == ("none", "fp32")), None)
    values = [_values(record, plain) for record in ended]
    header = ("approximate_backward", "precision", "peak predicted", "peak counted", "saved", "loss", "val")
    notes = [
        "Bytes of live tensors at a step's peak, weights and optimizer states included, as the record counts them; "
        f"saved: less than without approximation. The loss is the mean of the last {_LAST_STEPS} steps.",
        *_additive(ended),
        *(f"{' '.join(_names(record))}: {record['status']}" for record in records if record not in ended),
    ]
    rows = [tuple(_cell(value) for value in row) for row in values]
    table = {"name": "approximations", "title": "approximate backwards", "header": header, "rows": rows}
    curves = [Curve(" ".join(_names(record)), record["loss"]) for record in ended]
    figure = partial(draw, curves=curves)
    return {"tables": [table | {"values": values, "notes": notes}], "figures": {"approximations.svg": figure}}


def _names(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["config"]["approximate_backward"]["name"], record["config"]["precision"]["name"]


def _peak(record: Mapping[str, Any], kind: str) -> int:
    return int(max(record["peak_memory_bytes"][kind]))


def _values(record: Mapping[str, Any], plain: Mapping[str, Any] | None) -> tuple[Any, ...]:
    counted = _peak(record, "measured")
    saved = None if plain is None else _peak(plain, "measured") - counted
    val = record["val_loss"][-1][1] if record["val_loss"] else None
    return (*_names(record), _peak(record, "predicted"), counted, saved, fmean(record["loss"][-_LAST_STEPS:]), val)


def _additive(ended: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether both approximations together save what each saves alone."""
    peaks = {_names(record)[0]: _peak(record, "measured") for record in ended if _names(record)[1] == "fp32"}
    if not {"none", "fewbit", "randomized_linear", "both"} <= set(peaks):
        return []
    saved = {name: peaks["none"] - peak for name, peak in peaks.items()}
    apart = saved["fewbit"] + saved["randomized_linear"]
    return [f"Saved by each alone, added: {apart:,} bytes; by both together: {saved['both']:,} bytes."]


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
