"""Two nodes of two ranks with a network ten times slower: the layout of the search and others, planned and measured.

Six layers that sleep alike, with 1.1 MB of weights each and messages of 32 bytes for a sample. The links are emulated
(``transport.emulate_links``), so that one machine is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.plan.planners.joint import EFFORTS, JointSearch
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.plan.time.network import LinkClass, Network
from runner.plan.values import Link
from runner.recipes.finetune.commands import train
from runner.recipes.planners.measured import problem, sleeping_words, words

__all__ = ["LAYERS", "WIDTH", "asked", "found", "lines", "nodes"]

LAYERS = (0.005,) * 6
"""Seconds of a forward for each sample, by layer."""

WIDTH = 16384
"""Numbers inside a layer, each with 17 weights."""

_INSIDE, _BETWEEN = 2e7, 2e6  # bytes per second
_OPPOSITE = "parallelism.order=pipeline_inside"


def asked() -> PlanningProblem:
    """The layers and links as the search of ``parallelism=auto`` sees them."""
    of, count = problem(LAYERS), len(LAYERS)
    sizes = (4.0 * (17 * WIDTH + 8),) * count
    whole = replace(of.divisions[0], weight=sizes, gradient=sizes, boundary=(32.0,) * count)
    links = Network((LinkClass(Link(0.0, _INSIDE), 2), LinkClass(Link(0.0, _BETWEEN))))
    return replace(of, divisions=(whole,), memory=dict.fromkeys((1, 2, 4), 10**9), links=links, orders=of.orders[:1])


def found() -> PlanningAnswer:
    """The layout of the search."""
    return JointSearch(asked(), EFFORTS["normal"]).run().answers[0]


def nodes(folder: Path) -> list[dict[str, Any]]:
    """A row for each layout, with what the plan and the run say of a step.

    Args:
        folder: of the runs.
    """
    links = (
        f"{{name: node, ranks: 2, bytes_per_second: {_INSIDE}}},{{name: net, ranks: all, bytes_per_second: {_BETWEEN}}}"
    )
    shared = (
        *sleeping_words(LAYERS), f"+model.kwargs.width={WIDTH}", f"hardware.links=[{links}]",
        "transport.emulate_links=true",
    )  # fmt: skip
    best = words(found())
    ways = {
        "pipeline across, replicas inside": best,
        "pipeline inside, replicas across": (*best, _OPPOSITE),
        "replicas alone": ("parallelism.data=4",),
        "pipeline alone": ("parallelism.pipeline=4", "schedule=1f1b", "schedule.microbatches=32"),
    }
    rows = []
    for number, (name, own) in enumerate(ways.items()):
        step = train(folder / str(number), *shared, *own).record["step_seconds"]
        rows.append({"name": name, "planned": step["predicted"], "measured": step["median"]})
    return rows


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown, of the rows of :func:`nodes`."""
    yield "| layout of 4 ranks | planned | measured | over the first |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        times = row["measured"] / rows[0]["measured"]
        yield f"| {row['name']} | {row['planned']:.3f} s | {row['measured']:.3f} s | {times:.2f} times |"
