"""The step that each planner's layout takes by the one judge, over that of the joint search, by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Draw a panel for each workload into an SVG file; a hollow bar does not fit, and none cannot run.

    Args:
        path: the file.
        rows: with ``workload``, ``planner``, ``planned_seconds``, ``own_seconds`` and ``fits``.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(row["planner"] for row in rows))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "planners"}):  # the same bytes for the same figures
        figure = Figure(figsize=(2.6 * len(workloads) + 1.2, 4.2), layout="constrained")
        panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for axes, workload in zip(panels, workloads, strict=True):
            own = {row["planner"]: row for row in rows if row["workload"] == workload}
            unit = own["joint"]["planned_seconds"]
            for place, name in enumerate(names):
                row = own.get(name)
                if row is None or row["planned_seconds"] is None:
                    continue
                fill = {"color": "tab:blue"} if row["fits"] else {"facecolor": "none", "edgecolor": "tab:blue"}
                axes.barh(place, row["planned_seconds"] / unit, **fill)
                if row["own_seconds"] is not None:
                    axes.plot(row["own_seconds"] / unit, place, "k|", markersize=9)
            axes.set_title(workload, fontsize=9)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.axvline(1.0, color="gray", linewidth=0.6)
        panels[0].invert_yaxis()
        figure.supxlabel("step by the whole plan / that of joint (line: by the planner's own model)", fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
