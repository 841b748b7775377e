"""The picture of a campaign: how many faults of each kind hit each layout, and where one was not as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from runner.recipes.faults.campaign import Result
from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.layouts import LAYOUTS
from runner.recipes.faults.values import Fault

__all__ = ["draw"]

_INK, _FAILED = "#1f6f8b", "#c0392b"


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw a grid of kinds and layouts into an SVG file: a disc's area is the number of faults.

    Args:
        path: the file.
        results: of the campaign's runs.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    met = Counter((fault.kind, result.chain.layout) for result in results for fault in _injected(result))
    failed = Counter((fault.kind, result.chain.layout) for result in results for fault in result.failed)
    kinds = [kind for kind in KINDS if any(kind == each for each, _ in met)]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "faults"}):  # the same bytes for the same figures
        figure = Figure(figsize=(7.0, 1.2 + 0.19 * len(kinds)), layout="constrained")
        axes = figure.add_subplot()
        for (kind, layout), count in met.items():
            place = (list(LAYOUTS).index(layout), kinds.index(kind))
            axes.scatter(*place, s=9 * count, color=_FAILED if failed[kind, layout] else _INK, linewidths=0)
            axes.annotate(str(count), place, (9, 0), textcoords="offset points", va="center", fontsize=6)
        axes.set_xticks(range(len(LAYOUTS)), list(LAYOUTS))
        axes.set_yticks(range(len(kinds)), kinds, fontsize=7)
        axes.set_xlim(-0.5, len(LAYOUTS) - 0.5)
        axes.set_ylim(len(kinds) - 0.4, -0.6)
        axes.tick_params(length=0, labelbottom=False, labeltop=True)
        for side in axes.spines.values():
            side.set_visible(False)
        total, bad = sum(met.values()), sum(failed.values())
        axes.set_xlabel(f"{total:,} faults; red: not as promised ({bad})")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _injected(result: Result) -> Sequence[Fault]:
    return result.chain.faults[: result.happened]
