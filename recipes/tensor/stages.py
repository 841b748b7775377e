"""Counts what ranks of three dimensions exchange: between stages, between parts, and between replicas.

    python -m runner.recipes.tensor.stages [--out FOLDER] [--write-readme]

Runs that are already in the folder are not repeated.

Source of the formulas: Narayanan et al. 2021, sections 3.2 and 4.1 (what pipelines, parts and replicas exchange, and
scatter and gather); Korthikanti et al. 2022 (divided tokens).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.recipes.finetune.commands import train
from runner.recipes.schedules.tables import replace_block
from runner.recipes.tensor.counted import Layout, Size, formula_bytes, words
from runner.record import RunRecord

__all__ = ["Grid", "formulas", "grid_words", "grids", "main", "markdown"]

_FP32 = 4
_PIPELINE, _MICROBATCHES = 2, 2


@dataclass(frozen=True)
class Grid:
    """Two stages of two micro-batches, of so many replicas, whose layers so many ranks divide."""

    tensor: int = 2
    data: int = 1
    sequence: bool = False
    scatter: bool = False

    @property
    def name(self) -> str:
        degrees = f"pipeline {_PIPELINE}, tensor {self.tensor}{f', data {self.data}' if self.data > 1 else ''}"
        return f"{degrees}{', sequence' if self.sequence else ''}{', scatter' if self.scatter else ''}"


def grids() -> Iterator[Grid]:
    """The layouts of the table."""
    for tensor, data in ((2, 1), (2, 2), (4, 1)):
        yield Grid(tensor, data)
        yield Grid(tensor, data, scatter=True)
    yield Grid(2, 2, sequence=True)


def grid_words(size: Size, grid: Grid) -> tuple[str, ...]:
    """The overrides of a run of two steps."""
    degrees = (f"parallelism.pipeline={_PIPELINE}", f"parallelism.data={grid.data}")
    scatter = f"parallelism.scatter_boundaries={str(grid.scatter).lower()}"
    own = words(size, Layout(grid.tensor, grid.sequence))
    return *own, *degrees, scatter, f"schedule.microbatches={_MICROBATCHES}"


def formulas(size: Size, grid: Grid) -> dict[str, float]:
    """What all ranks together send in a step.

    Between two stages each of t ranks sends the activation of each sample, and receives its gradient; one part of t of
    both where boundaries are scattered, or tokens divided. Scattered parts are then gathered, once in each direction.
    Between parts, see :func:`runner.recipes.tensor.counted.formula_bytes`; where tokens are divided, the gradients of
    weights that all share are summed for each micro-batch. D replicas sum their gradients in a ring, in which each rank
    sends 2 (D - 1) / D of them; whole weights have t copies in a replica.
    """
    ranks, replicas = grid.tensor, grid.data
    activation = size.samples * size.sequence_length * size.width * _FP32
    by_parts = grid.scatter or grid.sequence
    parts = formula_bytes(size, Layout(ranks))
    if grid.sequence:
        more = formula_bytes(size, Layout(ranks, sequence=True)) - parts
        parts += more * replicas * _MICROBATCHES
    if grid.scatter:
        parts += 2 * (ranks - 1) * activation
    width = size.width
    whole = size.layers * 6 * width + 2 * width + size.sequence_length * width
    divided = size.layers * (12 * width**2 + 7 * width) + 2 * size.vocab_size * width
    return {
        "stages": 2 * (1 if by_parts else ranks) * activation,
        "parts": parts,
        "replicas": 2 * (replicas - 1) * (divided + ranks * whole) * _FP32,
    }


def counted(size: Size, grid: Grid, folder: Path) -> dict[str, Any]:
    """A row of the table, of a run of two steps."""
    if not (folder / "record.json").exists():
        train(folder, *grid_words(size, grid))
    record = RunRecord.load(folder)
    moved = record.bytes_moved
    found = {
        "stages": moved["activations"] + moved["activation_gradients"],
        "parts": moved["tensor"],
        "replicas": moved["weight_gradients"],
    }
    return {"layout": grid.name, "counted": found, "formulas": formulas(size, grid), "loss": record.loss[-1]}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    kinds = ("stages", "parts", "replicas")
    lines = [
        f"| layout | {' | '.join(f'between {each}, counted | by formula' for each in kinds)} | loss |",
        f"|{' --- |' * 8}",
    ]
    for row in rows:
        pairs = (f"{row[which][kind]:,.0f}" for kind in kinds for which in ("counted", "formulas"))
        lines.append(f"| {row['layout']} | {' | '.join(pairs)} | {row['loss']:.5f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tensor"))
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    asked = parser.parse_args(arguments)
    rows = [counted(Size(), grid, asked.out / grid.name.replace(", ", "_").replace(" ", "")) for grid in grids()]
    print(markdown(rows))
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "stages", markdown(rows))


if __name__ == "__main__":
    main()
