"""A benchmark's result: a table for people, JSON for the record."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.environment import environment
from runner.recipes.benchmarks.rounds import Seconds

__all__ = ["Figure", "figure", "publish"]


@dataclass(frozen=True)
class Figure:
    """One number of every round, and the most that its median may be.

    Args:
        name: what was divided by what.
        target: None where the number only informs.
    """

    name: str
    minimum: float
    median: float
    maximum: float
    target: float | None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.median <= self.target else "missed"


def figure(name: str, values: Sequence[float], target: float | None = None) -> Figure:
    """The figure of one value per round."""
    return Figure(name, min(values), statistics.median(values), max(values), target)


def publish(
    benchmark: str,
    *,
    settings: dict[str, Any],
    seconds: Seconds,
    figures: Sequence[Figure],
    losses: dict[str, list[float]],
    path: Path,
) -> None:
    """Print the table and write the JSON.

    Args:
        benchmark: its name.
        settings: what it ran.
        seconds: per contestant, seconds per step of every round.
        figures: what the rounds give.
        losses: per contestant, of its first steps: the sanity check that all computed the same.
        path: the JSON file.
    """
    document = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", f"runner.recipes.benchmarks.{benchmark}", *sys.argv[1:]],
        **environment(),
        "load": list(os.getloadavg()),
        "settings": settings,
        "figures": [asdict(one) | {"verdict": one.verdict} for one in figures],
        "seconds_per_step": seconds,
        "losses": losses,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console = Console()
    console.print(_seconds_table(benchmark, seconds))
    console.print(_figures_table(figures))
    console.print("load over 1, 5 and 15 minutes: {:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg()))
    console.print(f"written to {path}")


def _seconds_table(benchmark: str, seconds: Seconds) -> Table:
    table = Table("contestant", "rounds", "min", "median", "max", title=f"{benchmark}: seconds per step")
    for name, values in seconds.items():
        table.add_row(name, str(len(values)), *_numbers(min(values), statistics.median(values), max(values)))
    return table


def _figures_table(figures: Sequence[Figure]) -> Table:
    table = Table("figure", "min", "median", "max", "at most", "", title="of each round")
    for one in figures:
        most = "" if one.target is None else f"{one.target:g}"
        table.add_row(one.name, *_numbers(one.minimum, one.median, one.maximum), most, one.verdict)
    return table


def _numbers(*values: float) -> list[str]:
    return [f"{value:.4f}" for value in values]
