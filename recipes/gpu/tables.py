"""The tables and the figure of this recipe, from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.environment import environment
from runner.recipes.gpu.runs import PARTS
from runner.record import RunRecord

__all__ = ["Row", "memory_figure", "row_of", "tables"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """What one run came to; None where it does not say.

    Args:
        seconds, predicted_seconds: of a step.
        allocated, predicted_allocated, reserved, predicted_reserved: bytes of the rank that needs most.
        bubble, predicted_bubble: shares of the ranks' time.
        loss: of the last step.
    """

    name: str
    status: str = "ok"
    reason: str = ""
    seconds: float | None = None
    predicted_seconds: float | None = None
    allocated: int | None = None
    predicted_allocated: int | None = None
    reserved: int | None = None
    predicted_reserved: int | None = None
    bubble: float | None = None
    predicted_bubble: float | None = None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row_of(name: str, run_dir: Path, *, reason: str) -> Row:
    """The row of a run's record.

    Args:
        reason: told where the run left no record, or one without a reason.
    """
    try:
        record = RunRecord.load(run_dir)
    except (OSError, ValueError):
        return Row(name, status="failed", reason=reason)
    if record.status != "ok":
        return Row(name, status=record.status, reason=record.reason or reason)
    peaks, reserved = record.peak_memory_bytes, record.extras.get("reserved_bytes", {})
    return Row(
        name,
        seconds=record.step_seconds.get("median"),
        predicted_seconds=record.step_seconds.get("predicted"),
        allocated=max(peaks["measured"]),
        predicted_allocated=max(peaks["predicted"]),
        reserved=max(reserved["measured"]) if reserved else None,
        bubble=record.bubble_ratio.get("measured"),
        predicted_bubble=record.bubble_ratio.get("predicted"),
        loss=record.loss[-1],
    )


_HEAD = (
    *("run", "s/step", "predicted", "allocated GB", "predicted", "reserved GB", "predicted"),
    *("bubble", "predicted", "loss"),
)


def tables(found: Mapping[str, Sequence[Row]], device: str) -> str:
    """All parts as Markdown."""
    versions = environment()["versions"]
    lines = [f"# One {device}", "", f"torch {versions.get('torch')}. Predictions come before measurements in time.", ""]
    for part, rows in found.items():
        lines += [f"## {PARTS[part].title}", "", _line(_HEAD), _line(["---"] * len(_HEAD)), *map(_row, rows), ""]
    return "\n".join(lines)


def _row(row: Row) -> str:
    if row.status != "ok":
        return _line([row.name, f"{row.status}: {row.reason}".replace("|", "\\|"), *[""] * (len(_HEAD) - 2)])
    memory = (row.allocated, row.predicted_allocated, row.reserved, row.predicted_reserved)
    cells = [
        *(_shown(value, ".4f") for value in (row.seconds, row.predicted_seconds)),
        *(_shown(None if value is None else value / _GB, ".3f") for value in memory),
        *(_shown(value, ".1%") for value in (row.bubble, row.predicted_bubble)),
        _shown(row.loss, ".4f"),
    ]
    return _line([row.name, *cells])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def memory_figure(found: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Measured memory over predicted memory, allocated and reserved, of every run that has both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    rows = [row for part in found.values() for row in part]
    for kind in ("allocated", "reserved"):
        pairs = [(getattr(row, f"predicted_{kind}"), getattr(row, kind)) for row in rows]
        both = [(predicted / _GB, measured / _GB) for predicted, measured in pairs if predicted and measured]
        if both:
            axes.scatter(*zip(*both, strict=True), label=kind)
            axes.plot([0, max(map(max, both))], [0, max(map(max, both))], color="gray", linewidth=0.5)
    axes.set_xlabel("predicted, GB")
    axes.set_ylabel("measured, GB")
    if axes.collections:
        axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
