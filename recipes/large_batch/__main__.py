"""Runs every batch size with every rule, measures the weights, and makes the table and the figure.

    python -m runner.recipes.large_batch [--samples N] [--out FOLDER] [--write-readme]

Each run is a ``runner train recipe=large_batch …``; runs that are already in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runner.recipes.finetune.commands import train
from runner.recipes.large_batch.emoji import Bench
from runner.recipes.large_batch.figures import draw
from runner.recipes.large_batch.rules import SAMPLES, Cell, cells
from runner.recipes.large_batch.tables import markdown
from runner.recipes.schedules.tables import replace_block

__all__ = ["main"]

_PAGE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of every run")
    parser.add_argument("--out", type=Path, default=Path("outputs/large_batch"))
    parser.add_argument("--write-readme", action="store_true", help="put the table and the figure into the README")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bench = Bench()
    rows = [_row(bench, cell, asked.out / cell.folder) for cell in cells(asked.samples)]
    first = asked.out / next(cells(asked.samples)).folder / "weights.safetensors"
    noise = {"before training": bench.noise(None), "after it, batches of 24": bench.noise(first)}
    made: dict[str, Any] = {"samples": asked.samples, "rows": rows, "noise": noise}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "results.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(markdown(made))
    if asked.write_readme:
        replace_block(_PAGE / "README.md", "measured", f"{markdown(made)}\n\n![large batches](large_batch.svg)")
        draw(_PAGE / "large_batch.svg", made)


def _row(bench: Bench, cell: Cell, folder: Path) -> dict[str, Any]:
    """What is known of a run; it is made if it is not there, and measured once."""
    measured = folder / "measured.json"
    if measured.exists():
        return dict(json.loads(measured.read_text(encoding="utf-8")))
    told = {"rule": cell.rule, "batch": cell.batch, "steps": cell.steps, "rate": cell.rate}
    try:
        train(folder, *cell.overrides)
    except RuntimeError as error:  # a loss that is not a number stops a run
        row = {**told, "failed": str(error).splitlines()[-1]}
    else:
        row = {**told, **bench.measure(folder / "weights.safetensors")}
    folder.mkdir(parents=True, exist_ok=True)
    measured.write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
