"""The survey's figures 1 to 3, and the schedules drawn side by side, several on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.recipes.schedules.computed import COSTS
from runner.schedule.catalogue.registry import build
from runner.schedule.render import Panel, events_of, panels_svg
from runner.schedule.simulation.clock import simulate

__all__ = ["FIGURES", "Drawn", "draw"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One schedule of a figure; ``chunks`` None is the schedule's own."""

    schedule: str
    ranks: int = 4
    microbatches: int = 8
    chunks: int | None = None

    def panel(self) -> Panel:
        """The picture, with the share of the ranks' time that is idle."""
        made = build(self.schedule, ranks=self.ranks, microbatches=self.microbatches, chunks=self.chunks)
        label = self.schedule + (f", v = {made.chunks}" if made.chunks > 1 else "")
        idle = simulate(made, COSTS).bubble_ratio
        return Panel(f"{label}: idle {100 * idle:.1f} %", events_of(made, COSTS), made.filling)


FIGURES = {
    "survey-1": (Drawn("naive", 3, 1),),
    "survey-2": (Drawn("gpipe", 4, 4),),
    "survey-3": (Drawn("pipedream", 4, 4),),
    "side-by-side-1": (Drawn("naive"), Drawn("gpipe")),
    "side-by-side-2": tuple(map(Drawn, ("1f1b", "1f1b_eager", "zb_h1", "zb_h2"))),
    "side-by-side-3": (
        *(Drawn(name, chunks=2) for name in ("interleaved_1f1b", "looped_bfs", "zb_v", "dualpipe_v", "hanayo")),
    ),
}
"""Guan et al. 2024: naive order, GPipe, PipeDream. Then one micro-batch against many, one and two stages per rank."""


def draw(folder: Path) -> list[Path]:
    """Write every figure into ``folder``, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(folder / f"{name}.svg", panels) for name, panels in FIGURES.items()]


def _draw(path: Path, panels: Sequence[Drawn]) -> Path:
    path.write_text(panels_svg([one.panel() for one in panels], unit="F"), encoding="utf-8")
    return path
