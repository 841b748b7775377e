"""The published table of optimizers by stages of ZeRO, beside what a sweep of this recipe recorded.

Published: Gusak et al. 2022, "Survey on Large Scale Neural Network Training", table 5: Malevich (1.31 billion
parameters) fine-tuned for 550 steps on 16 A100; peak reserved memory in GB, seconds per step, weighted loss. Absolute
figures are another machine's and another model's: what can be compared are the ratios to Adam without sharing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

__all__ = ["OPTIMIZERS", "PUBLISHED", "STAGES", "Cell", "cells_of", "sweep_report"]

OPTIMIZERS = ("adam", "adam8bit", "cpu_adam", "fused_adam", "onebit_adam")
STAGES = (0, 1, 2, 3)
NAMES = dict(zip(OPTIMIZERS, ("Adam", "8-bit Adam", "CPU Adam", "Fused Adam", "1-bit Adam"), strict=True))

Key = tuple[str, int]

# Optimizer and stage to (memory in GB, seconds per step, loss); what is not there is a dash.
PUBLISHED: dict[Key, tuple[float, float, float]] = {
    ("adam", 0): (69.7, 0.95, 3.540),
    ("adam", 1): (61.6, 0.90, 3.541),
    ("adam", 2): (60.6, 0.85, 3.541),
    ("adam", 3): (51.9, 1.20, 3.542),
    ("adam8bit", 0): (59.7, 0.88, 3.539),
    ("adam8bit", 1): (60.8, 0.89, 3.540),
    ("adam8bit", 2): (60.2, 0.84, 3.540),
    ("adam8bit", 3): (51.3, 1.18, 3.541),
    ("cpu_adam", 2): (59.6, 1.44, 3.541),
    ("cpu_adam", 3): (50.1, 1.58, 3.542),
    ("fused_adam", 0): (69.7, 0.90, 3.540),
    ("fused_adam", 1): (61.6, 0.89, 3.541),
    ("fused_adam", 2): (60.6, 0.86, 3.541),
    ("fused_adam", 3): (51.9, 1.18, 3.542),
    ("onebit_adam", 0): (73.1, 1.51, 3.523),
}
_WARM_STEPS = 10  # not read for the time
_LAST_STEPS = 55  # their mean is the loss


@dataclass(frozen=True, slots=True)
class Cell:
    """What one run of the sweep came to; None where it did not run or the record does not say.

    Args:
        status, reason: as recorded.
        state_bytes: weights, gradients and optimizer states of a rank on its device, the most of all ranks.
        host_bytes: the same of what is offloaded.
        predicted_bytes: of ``state_bytes``, before the run.
        peak_bytes: measured, of the rank that needs most.
        seconds: per step, the median after ten.
        loss: weighted, mean of the last 55 steps.
        seen, unseen: validation cross-entropy of the image by whether its caption was trained on.
        losses: of every step.
    """

    status: str
    reason: str | None = None
    state_bytes: float | None = None
    host_bytes: float | None = None
    predicted_bytes: float | None = None
    peak_bytes: float | None = None
    seconds: float | None = None
    loss: float | None = None
    seen: float | None = None
    unseen: float | None = None
    losses: tuple[float, ...] = ()


def cells_of(runs: Sequence[Mapping[str, Any]]) -> dict[Key, Cell]:
    """By optimizer and stage.

    Args:
        runs: of each job its ``directory`` and its ``record``.
    """
    found = {}
    for run in runs:
        config = run["record"].get("config") or {}
        key = (config.get("optimizer", {}).get("name"), config.get("zero", {}).get("stage"))
        if key[0] in OPTIMIZERS and key[1] in STAGES:
            found[key] = _cell(Path(run["directory"]), run["record"])
    return found


def _cell(directory: Path, record: Mapping[str, Any]) -> Cell:
    if record["status"] != "ok":
        return Cell(record["status"], record.get("reason"))
    states = record.get("state_bytes", {})
    measured, predicted = states.get("measured") or [], states.get("predicted") or []
    seconds = [value for value in record["step_seconds"]["all"] if value is not None]
    losses = tuple(value for value in record["loss"] if value is not None)
    metrics = _metrics(directory, record)
    return Cell(
        "ok",
        state_bytes=max(map(_on_device, measured), default=None),
        host_bytes=max((rank["host"] for rank in measured), default=None),
        predicted_bytes=max(map(_on_device, predicted), default=None),
        peak_bytes=max((peak for peak in record["peak_memory_bytes"]["measured"] if peak is not None), default=None),
        seconds=median(seconds[_WARM_STEPS:] or seconds) if seconds else None,
        loss=fmean(losses[-_LAST_STEPS:]) if losses else None,
        seen=metrics.get("image_seen_cross_entropy"),
        unseen=metrics.get("image_unseen_cross_entropy"),
        losses=losses,
    )


def _on_device(rank: Mapping[str, int]) -> int:
    return rank["weights"] + rank["gradients"] + rank["optimizer"]


def _metrics(directory: Path, record: Mapping[str, Any]) -> dict[str, float]:
    path = directory / record.get("artifacts", {}).get("metrics", "none")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def sweep_report(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tables of a sweep of this recipe, and what draws its figure.

    Args:
        runs: see :func:`cells_of`.

    Returns:
        ``tables``, each with its name, title, header, rows, values and notes; ``figures`` by the names of their files.
    """
    from runner.recipes.rudalle.table5_claims import claims_table
    from runner.recipes.rudalle.table5_figure import draw

    cells = cells_of(runs)
    tables = [_side_by_side(cells), _exact(cells), claims_table(cells)]
    return {"tables": tables, "figures": {"table5.png": partial(draw, cells=cells)}}


def _side_by_side(cells: Mapping[Key, Cell]) -> dict[str, Any]:
    """The published grid, below each of its rows ours: memory, seconds, loss, and ratios to Adam without sharing."""
    rows = []
    for optimizer in OPTIMIZERS:
        rows.append((NAMES[optimizer], "paper", *(_published(optimizer, stage) for stage in STAGES)))
        rows.append(("", "here", *(_here(cells, optimizer, stage) for stage in STAGES)))
    notes = [
        "paper: GB reserved (ratio) / seconds (ratio) / loss. Here: MB of weights, gradients and optimizer states of a "
        "rank, counted (ratio) / peak MB (ratio) / seconds (ratio) / loss. Ratios are to Adam with ZeRO 0.",
        *_reasons(cells),
    ]
    header = ("optimizer", "", *(f"ZeRO {stage}" for stage in STAGES))
    return {
        "name": "table5",
        "title": "table 5: the paper and here",
        "header": header,
        "rows": rows,
        "values": rows,
        "notes": notes,
    }


def _published(optimizer: str, stage: int) -> str:
    figures = PUBLISHED.get((optimizer, stage))
    if figures is None:
        return "-"
    memory, seconds, loss = figures
    base = PUBLISHED["adam", 0]
    return f"{memory:.1f} ({memory / base[0]:.3f}) / {seconds:.2f} ({seconds / base[1]:.3f}) / {loss:.3f}"


def _here(cells: Mapping[Key, Cell], optimizer: str, stage: int) -> str:
    cell = cells.get((optimizer, stage))
    if cell is None or cell.status != "ok":
        return "-" if cell is None or cell.status == "unsupported" else cell.status
    base = cells.get(("adam", 0), Cell("missing"))
    state = _with_ratio(cell.state_bytes, base.state_bytes, 1e6, ".2f")
    peak = _with_ratio(cell.peak_bytes, base.peak_bytes, 1e6, ".1f")
    seconds = _with_ratio(cell.seconds, base.seconds, 1.0, ".3f")
    return f"{state} / {peak} / {seconds} / {_number(cell.loss, '.4f')}"


def _with_ratio(value: float | None, base: float | None, unit: float, form: str) -> str:
    if value is None:
        return "-"
    ratio = f" ({value / base:.3f})" if base else ""
    return f"{value / unit:{form}}{ratio}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _reasons(cells: Mapping[Key, Cell]) -> Iterator[str]:
    for optimizer in OPTIMIZERS:
        for stage in STAGES:
            cell = cells.get((optimizer, stage), Cell("missing", "not in this sweep"))
            if cell.status != "ok":
                yield f"{NAMES[optimizer]}, ZeRO {stage}: {cell.status}: {' '.join((cell.reason or '').split())}"


_EXACT = ("state_bytes", "predicted_bytes", "host_bytes", "peak_bytes", "seconds", "loss", "seen", "unseen")


def _exact(cells: Mapping[Key, Cell]) -> dict[str, Any]:
    """One row per cell, in base units."""
    header = ("optimizer", "zero", "status", *_EXACT)
    rows, values = [], []
    for optimizer in OPTIMIZERS:
        for stage in STAGES:
            cell = cells.get((optimizer, stage), Cell("missing", "not in this sweep"))
            figures = [getattr(cell, name) for name in _EXACT]
            forms = [",.0f"] * 4 + [".4f"] * 4
            shown = [_number(value, form) for value, form in zip(figures, forms, strict=True)]
            rows.append((optimizer, str(stage), cell.status, *shown))
            published = PUBLISHED.get((optimizer, stage), (None, None, None))
            values.append((optimizer, stage, cell.status, *figures, cell.reason or "", *published))
    return {
        "name": "table5_cells",
        "title": "every cell",
        "header": header,
        "rows": rows,
        "value_header": (*header, "reason", "paper_memory_gb", "paper_seconds", "paper_loss"),
        "values": values,
        "notes": ["bytes of a rank; seen and unseen: validation cross-entropy of images, by caption"],
    }
