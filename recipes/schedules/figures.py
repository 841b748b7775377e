"""The schedules drawn, several on one time axis, as the survey draws them side by side in its figures 1 to 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.recipes.schedules.computed import COSTS
from runner.recipes.schedules.rows import ROWS, Row
from runner.schedule.render import Panel, events_of, panels_svg
from runner.schedule.simulation.clock import simulate

__all__ = ["FIGURES", "draw"]

FIGURES = {
    "figure-1": ("naive", "gpipe"),
    "figure-2": ("1f1b", "1f1b_eager", "zb_h1", "zb_h2"),
    "figure-3": ("interleaved_1f1b", "looped_bfs", "zb_v", "dualpipe_v", "hanayo"),
}
"""What stands in each: one micro-batch against many; one stage per rank; two stages per rank."""

_RANKS, _MICROBATCHES = 4, 8


def draw(folder: Path) -> list[Path]:
    """Write every figure into ``folder``, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure, names in FIGURES.items():
        path = folder / f"{figure}.svg"
        path.write_text(panels_svg(_panels(names), unit="F"), encoding="utf-8")
        written.append(path)
    return written


def _panels(names: Sequence[str]) -> list[Panel]:
    """The first row of each name."""
    return [_panel(next(row for row in ROWS if row.schedule == name)) for name in names]


def _panel(row: Row) -> Panel:
    schedule = row.build(_RANKS, _MICROBATCHES)
    ratio = simulate(schedule, COSTS).bubble_ratio
    return Panel(f"{row.label}: idle {100 * ratio:.1f} %", events_of(schedule, COSTS), schedule.filling)
