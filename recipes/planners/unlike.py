"""Devices of unlike speed, emulated: even stages beside the order and cut that a plan finds, planned and measured.

Twelve layers that sleep alike on 3 ranks, 8 micro-batches in 1F1B. A rank of a slower class sleeps after each
computation, so that it takes as long as its device would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.recipes.finetune.commands import train
from runner.recipes.planners.measured import sleeping_words

__all__ = ["compared", "lines"]

_LAYERS = (0.0025,) * 12  # seconds of a forward for each sample
_SPEEDS = ((1, 2, 4), (1, 1, 4))


def compared(folder: Path) -> list[dict[str, Any]]:
    """A row for each set of speeds and each way to cut, of runs in a folder."""
    rows = []
    for speeds in _SPEEDS:
        names = [f"d{rank}" for rank in range(len(speeds))]
        classes = ", ".join(
            f"{{name: {name}, speed: {speed / max(speeds)}}}" for name, speed in zip(names, speeds, strict=True)
        )
        ways = {
            "even": ("partition=uniform", f"parallelism.devices=[{','.join(names)}]"),
            "best cut in this order": ("partition=auto", f"parallelism.devices=[{','.join(names)}]"),
            "order and cut": ("partition=auto",),
        }
        shared = (f"hardware.devices=[{classes}]", f"parallelism.pipeline={len(speeds)}", "schedule.microbatches=8")
        for number, (name, words) in enumerate(ways.items()):
            run = folder / "-".join(map(str, (*speeds, number)))
            record = train(run, *sleeping_words(_LAYERS), *shared, *words).record
            step = record["step_seconds"]
            row = {"speeds": ":".join(map(str, speeds)), "way": name}
            rows.append(row | {"planned": step["predicted"], "measured": step["median"]})
    return rows


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown, of the rows of :func:`compared`."""
    yield "| speeds | stages | planned | measured | even stages take |"
    yield "| --- | --- | --- | --- | --- |"
    even = {row["speeds"]: row["measured"] for row in rows if row["way"] == "even"}
    for row in rows:
        times = even[row["speeds"]] / row["measured"]
        cells = row["speeds"], row["way"], f"{row['planned']:.3f} s", f"{row['measured']:.3f} s", f"{times:.2f} times"
        yield f"| {' | '.join(cells)} |"
