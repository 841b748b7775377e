"""Tables and figures that a recipe's own function makes from a sweep's records; ``sweep_report`` names the function.

A record may come from a stranger. So only functions that shipped recipes name are called because a record names them,
and others only if the user names them, too.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.compose.files import read_option
from runner.config.compose.groups import RECIPE, options, shipped_conf
from runner.config.rules.sections import may_be_called
from runner.report.read import Report
from runner.report.tables import TextTable

__all__ = ["RecipeReport", "recipe_report", "refusal"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecipeReport:
    """Tables by the name of their file, and figures by the name of their file with a function that draws each."""

    tables: dict[str, TextTable] = field(default_factory=dict)
    figures: dict[str, Callable[[Path], object]] = field(default_factory=dict)

    def draw(self, place: Path) -> list[Path]:
        """Draw the figures into ``place`` and return their files."""
        for name, draw in self.figures.items():
            draw(place / name)
        return [place / name for name in self.figures]


def recipe_report(found: Report, allowed: Collection[str] = ()) -> RecipeReport:
    """Call the function that the runs name; the result is empty if there is none or ``found`` is not a sweep.

    A function that is neither shipped nor ``allowed`` is not imported; see :func:`refusal`.

    For every run that has begun, the function receives its ``directory`` and its ``record``. It returns ``tables``,
    each with name, title, header, rows, values and notes, and ``figures``. If it fails, the report continues without
    it.
    """
    target = _target(found)
    if target is None or target not in (*_shipped(), *allowed):
        return RecipeReport()
    module, _, name = target.partition(":")
    if target in allowed and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a user's own function is in the working directory
    begun = [run for run in found.runs if run.record.status != "waiting"]
    runs = [{"directory": str(run.directory), "record": run.record.to_json()} for run in begun]
    try:
        made: Mapping[str, Any] = getattr(importlib.import_module(module), name)(runs)
        return RecipeReport({table["name"]: _table(table) for table in made["tables"]}, dict(made.get("figures", {})))
    except Exception:
        logger.exception("the report goes without sweep_report = %s, which failed", target)
        return RecipeReport()


def refusal(found: Report, allowed: Collection[str] = ()) -> str | None:
    """What is to be told of a function that the runs name and that is not called; None if there is none."""
    target = _target(found)
    if target is None or target in (*_shipped(), *allowed):
        return None
    told = f"the report goes without sweep_report = {target}: a record names it, and it is not shipped with the runner"
    return f"{told}. If it is your own: --allow {target}" if may_be_called(target) else told


def _target(found: Report) -> str | None:
    """The function that the runs of a sweep name."""
    targets = (run.record.config.get("sweep_report") for run in found.runs)
    return next((str(one) for one in targets if one), None) if found.is_sweep else None


def _shipped() -> set[str]:
    """The functions that shipped recipes name."""
    contents = (read_option(recipe.path) for recipe in options(RECIPE, [shipped_conf()]).values())
    return {str(content["sweep_report"]) for content in contents if content.get("sweep_report")}


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
