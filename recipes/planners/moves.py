"""What it takes to move layers between stages while a run trains, over a step: ``partition.migrate`` on the small GPT.

vPipe moves layers as a run needs it. Here two stages of the small GPT lose and get layers at named steps, under AdamW.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from runner.config.units import format_bytes, format_seconds
from runner.recipes.finetune.commands import train

__all__ = ["lines", "moves"]

_RUN = (
    *("model=gpt", "data=random_tokens", "device=cpu", "logger=none", "parallelism.pipeline=2"),
    *("schedule.microbatches=4", "partition=manual", "partition.boundaries=[3]", "optimizer=adamw"),
    *("trainer.max_steps=40", "trainer.progress=false"),
)
_STEPS = (8, 14, 20, 26, 32, 36)
_WAYS = {"one block of four": ([2], [3]), "two blocks": ([1], [3])}
"""Boundaries that follow each other in turn."""


def moves(folder: Path) -> list[dict[str, Any]]:
    """A row for each number of layers that move there and back three times, of runs in a folder."""
    rows = []
    for number, (name, cuts) in enumerate(_WAYS.items()):
        cut_of = {step: cuts[turn % 2] for turn, step in enumerate(_STEPS)}
        record = train(folder / str(number), *_RUN, f"partition.migrate={cut_of}").record
        moved = record["layer_moves"]
        rows.append(
            {
                "name": name,
                "bytes": moved[0]["bytes"],
                "seconds": median(each["seconds"] for each in moved),
                "longest": max(each["seconds"] for each in moved),
                "step": record["step_seconds"]["median"],
                "load": os.getloadavg()[0],
            }
        )
    return rows


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown, of the rows of :func:`moves`."""
    yield "| what moves | with its states | a move | the longest of six | a step | a move over a step | load |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        seconds = [format_seconds(row[key]) for key in ("seconds", "longest", "step")]
        over, load = f"{row['seconds'] / row['step']:.2f}", f"{row['load']:.1f}"
        yield f"| {' | '.join((row['name'], format_bytes(row['bytes']), *seconds, over, load))} |"
