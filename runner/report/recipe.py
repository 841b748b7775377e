"""What a recipe makes of a sweep's records: ``sweep_report`` names its function, of plain values to plain values."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.report.read import Report
from runner.report.tables import TextTable

__all__ = ["RecipeReport", "recipe_report"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecipeReport:
    """Tables by the name of their file; figures by the name of theirs, each with what draws it."""

    tables: dict[str, TextTable] = field(default_factory=dict)
    figures: dict[str, Callable[[Path], object]] = field(default_factory=dict)

    def draw(self, place: Path) -> list[Path]:
        """The figures' files, in ``place``."""
        for name, draw in self.figures.items():
            draw(place / name)
        return [place / name for name in self.figures]


def recipe_report(found: Report) -> RecipeReport:
    """Empty where ``found`` is no sweep, or none of its runs names a function.

    The function gets of every run that has begun its ``directory`` and its ``record``; it returns ``tables``, each with
    name, title, header, rows, values and notes, and ``figures``. Where it fails the report goes on without it.
    """
    targets = (run.record.config.get("sweep_report") for run in found.runs)
    target = next((one for one in targets if one), None)
    if target is None or not found.is_sweep:
        return RecipeReport()
    module, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a user's own function lies in the working directory
    begun = [run for run in found.runs if run.record.status != "waiting"]
    runs = [{"directory": str(run.directory), "record": run.record.to_json()} for run in begun]
    try:
        made: Mapping[str, Any] = getattr(importlib.import_module(module), name)(runs)
        return RecipeReport({table["name"]: _table(table) for table in made["tables"]}, dict(made.get("figures", {})))
    except Exception:
        logger.exception("the report goes without sweep_report = %s, which failed", target)
        return RecipeReport()


def _table(made: Mapping[str, Any]) -> TextTable:
    header = tuple(made["header"])
    return TextTable(
        made["title"],
        header,
        tuple(tuple(row) for row in made["rows"]),
        tuple(made.get("value_header", header)),
        tuple(tuple(row) for row in made["values"]),
        tuple(made["notes"]),
    )
