"""The last lines of a run: how it ended, and where its files are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.config.units import format_seconds
from runner.record import RunRecord

__all__ = ["ending"]

_NOT_TOLD = ("steps", "trace")  # files for programs; they lie beside the others


def ending(record: RunRecord, run_dir: Path, seconds: float) -> list[str]:
    """The lines that a complete run prints.

    Args:
        run_dir: the run's directory as it is shown.
        seconds: how long the run took in all, with its preparation.
    """
    results = [f"{record.steps} steps in {format_seconds(seconds)}", *_losses(record)]
    files = {name: str(run_dir / path) for name, path in record.artifacts.items() if name not in _NOT_TOLD}
    rows = {name.replace("_", " "): path for name, path in files.items()}
    rows["report"] = shlex.join(["runner", "report", str(run_dir)])
    width = max(map(len, rows))
    return [", ".join(results), *(f"{name:{width}}  {path}" for name, path in rows.items())]


def _losses(record: RunRecord) -> Iterator[str]:
    if record.loss:
        yield f"loss {record.loss[-1]:.4f}"
    validations = [(loss, int(step)) for step, loss in record.val_loss if math.isfinite(loss)]
    if validations:
        loss, step = min(validations)
        yield f"best validation {loss:.4f} after step {step}"
        for name, pairs in record.metrics.items():
            yield from (f"{name} {value:.4f}" for at, value in pairs if at == step)
