"""Counts what ranks that divide a GPT exchange and keep, compares processor times, and makes tables and a figure.

    python -m runner.recipes.tensor [--out FOLDER] [--rounds N] [--write-readme]

Runs that are already in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.counted import Size, counted, layouts
from runner.recipes.tensor.figures import draw
from runner.recipes.tensor.peers import compare

__all__ = ["main", "markdown"]

_PAGE = Path(__file__).parent
_PEERS = (
    {"width": 64, "layers": 4, "samples": 4, "tokens": 64},
    {"width": 256, "layers": 4, "samples": 2, "tokens": 128},
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tensor"))
    parser.add_argument("--rounds", type=int, default=20, help="steps of each contestant that are timed")
    parser.add_argument("--write-readme", action="store_true", help="put tables and figure into the README")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = [
        counted(Size(), layout, asked.out / layout.name.replace(", ", "_").replace(" ", "")) for layout in layouts()
    ]
    peers = [row for sizes in _PEERS for row in compare(2, **sizes, rounds=asked.rounds)]
    made = {"rows": rows, "peers": peers}
    (asked.out / "results.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(markdown(made))
    if asked.write_readme:
        replace_block(_PAGE / "README.md", "measured", f"{markdown(made)}\n\n![bytes of divided layers](tensor.svg)")
        draw(_PAGE / "tensor.svg", rows)


def markdown(made: Mapping[str, Any]) -> str:
    """The two tables."""
    return "\n".join((*_counted(made["rows"]), "", *_peers(made["peers"])))


def _counted(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| layout | sent in a step, counted | by formula | peak of a rank, counted | planned | loss |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        figures = (row["sent"], row["formula"], row["peak"], row["planned"])
        yield f"| {row['layout']} | {' | '.join(f'{each:,.0f}' for each in figures)} | {row['loss']:.5f} |"


def _peers(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| width | samples x tokens | contestant | processor time of a rank's step | wall time | gradient off by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        size = f"{row['width']} | {row['samples']} x {row['tokens']}"
        times = f"{row['milliseconds']:.1f} ms | {row['wall_milliseconds']:.1f} ms"
        off = "-" if row["off"] is None else f"{row['off']:.0e}"
        yield f"| {size} | {row['contestant']} | {times} | {off} |"


if __name__ == "__main__":
    main()
