"""Asks every planner for layouts of the same workloads, judges and measures them, and makes tables and a figure.

    python -m runner.recipes.planners [--workloads NAME ...] [--measure] [--out FOLDER] [--write-readme]

What is already in the folder is not repeated: a workload is a file of it, and so are the runs of sleeping layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.units import format_bytes, format_seconds
from runner.recipes.planners.compared import compared
from runner.recipes.planners.figures import draw
from runner.recipes.planners.halves import LAYERS, halves
from runner.recipes.planners.halves import lines as halved_lines
from runner.recipes.planners.measured import SECONDS, asleep, measure
from runner.recipes.planners.moves import lines as moves_lines
from runner.recipes.planners.moves import moves
from runner.recipes.planners.nodes import lines as nodes_lines
from runner.recipes.planners.nodes import nodes
from runner.recipes.planners.policy import lines as policy_lines
from runner.recipes.planners.table4 import lines
from runner.recipes.planners.unlike import compared as unlike
from runner.recipes.planners.unlike import lines as unlike_lines
from runner.recipes.planners.workloads import WORKLOADS
from runner.recipes.schedules.tables import replace_block

__all__ = ["main", "markdown", "measured_lines"]

_PAGE = Path(__file__).parent
_WHOLE = 10  # seconds from which tables have no fractions


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and measure, and print the tables or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=[each.name for each in WORKLOADS])
    parser.add_argument("--measure", action="store_true", help="train layers that sleep in each layout that is chosen")
    parser.add_argument("--out", type=Path, default=Path("outputs/planners"))
    parser.add_argument("--write-readme", action="store_true", help="put tables and figure into the README")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = list(_compared(asked.out, asked.workloads or [each.name for each in WORKLOADS]))
    slept = _measured(asked.out / "sleeping", asleep, SECONDS, measured=asked.measure)
    halved = list(halved_lines(_measured(asked.out / "halves", halves, LAYERS, measured=asked.measure)))
    learned = list(policy_lines())
    by_device = list(unlike_lines(unlike(asked.out / "unlike") if asked.measure else ()))
    by_node = list(nodes_lines(nodes(asked.out / "nodes") if asked.measure else ()))
    moving = list(moves_lines(moves(asked.out / "moves") if asked.measure else ()))
    blocks = markdown(rows), measured_lines(slept), halved, by_device, by_node, moving, learned, lines()
    print("\n\n".join("\n".join(block) for block in blocks))
    if asked.write_readme:
        figure = draw(_PAGE / "planners.svg", rows)
        picture = f"![steps of the planners' layouts, over those of joint]({figure.name})"
        replace_block(_PAGE / "README.md", "compared", "\n".join((*markdown(rows), "", picture)))
        replace_block(_PAGE / "README.md", "measured", "\n".join(measured_lines(slept)))
        replace_block(_PAGE / "README.md", "halved", "\n".join(halved))
        if asked.measure:
            replace_block(_PAGE / "README.md", "unlike", "\n".join(by_device))
            replace_block(_PAGE / "README.md", "nodes", "\n".join(by_node))
            replace_block(_PAGE / "README.md", "moves", "\n".join(moving))
        replace_block(_PAGE / "README.md", "learned", "\n".join(learned))
        replace_block(_PAGE / "README.md", "decides", "\n".join(lines()))


def _compared(out: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for workload in WORKLOADS:
        file = out / f"{workload.name}.json"
        if workload.name in names and not file.exists():
            file.write_text(json.dumps(compared(workload), indent=1) + "\n", encoding="utf-8")
        if file.exists():
            yield from json.loads(file.read_text(encoding="utf-8"))


def _measured(
    out: Path, make: Callable[[], list[dict[str, Any]]], seconds: Sequence[float], *, measured: bool
) -> list[dict[str, Any]]:
    """Rows of layers that sleep; equal layouts are one run.

    Args:
        out: the beginning of the names of a file and of the folders of runs.
        make: makes the rows, if they are in no file.
        seconds: see :func:`runner.recipes.planners.measured.measure`.
        measured: whether they are measured.
    """
    file = out.with_name(f"{out.name}.json")
    if file.exists():
        found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return found
    rows, known = make(), dict[tuple[str, ...], float]()
    for row in rows if measured else ():
        words = tuple(row.get("overrides", ()))
        if words and words not in known:
            known[words] = measure(row, out.with_name(f"{out.name}{len(known)}"), seconds)
        if words:
            row["measured_seconds"] = known[words]
    if measured:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of workloads and planners."""
    made = [
        "| workload | planner | search | its own step | by the whole plan | peak | fits | layout, or why not |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        planned, own, peak = row["planned_seconds"], row["own_seconds"], row["peak_bytes"]
        searched = row["search_seconds"]
        cells = (
            row["workload"],
            f"`{row['planner']}`",
            f"{searched:.0f} s" if searched >= _WHOLE else f"{searched:.2g} s",
            format_seconds(own) if own is not None else "-",
            format_seconds(planned) if planned is not None else "-",
            format_bytes(peak) if peak is not None else "-",
            {True: "yes", False: "no", None: "-"}[row["fits"]],
            row["layout"] or row["why_not"],
        )
        made.append(f"| {' | '.join(cells)} |")
    return made


def measured_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of the layers that sleep."""
    made = [
        "| planner | layout, or why it cannot run | fits | its own step | played | measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        own, played, taken = (row.get(f"{name}_seconds") for name in ("own", "judged", "measured"))
        cells = (
            f"`{row['planner']}`",
            row["why_not"] or row["layout"],
            {True: "yes", False: "no", None: "-"}[row.get("fits")],
            *(f"{each:.2f} s" if each is not None else "-" for each in (own, played, taken)),
        )
        made.append(f"| {' | '.join(cells)} |")
    return made


if __name__ == "__main__":
    main()
