"""What it saves to halve the first micro-batch, as AutoPipe's slicer does: played, by its formula, and measured.

Four layers that sleep alike on 4 ranks, 8 micro-batches in 1F1B: the pipeline fills in half the time, which saves
(D - 1) F / 2 of a step, where a forward of a whole micro-batch on one of D ranks takes F seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.plan.planners.values import Order, PlanningAnswer
from runner.recipes.planners.measured import judged, problem, words

__all__ = ["FORWARD", "LAYERS", "formula", "halves", "lines"]

_RANKS, _MICROBATCHES = 4, 8
LAYERS = (0.04,) * _RANKS
"""Seconds of a forward for each sample, by layer."""

FORWARD = LAYERS[0] * problem(LAYERS).batch / _MICROBATCHES
"""Seconds of a whole micro-batch's forward on one rank."""


def formula() -> float:
    """Seconds of a step that halving the first micro-batch saves by the formula."""
    return (_RANKS - 1) * FORWARD / 2


def halves() -> list[dict[str, Any]]:
    """A row for a step of whole micro-batches, and one for a step whose first micro-batch is two halves."""
    of, stages = problem(LAYERS), tuple((layer, layer) for layer in range(_RANKS))
    kept = (of.divisions[0].kept[0].name,) * _RANKS
    rows = []
    for name, shares in (("whole", ()), ("the first in halves", (1, 1, *(2,) * (_MICROBATCHES - 1)))):
        count = len(shares) or _MICROBATCHES
        answer = PlanningAnswer("", _RANKS, 1, 1, count, Order("1f1b", 1), stages, kept, None, 0.0, shares=shares)
        rows.append({"name": name, "judged_seconds": judged(of, answer), "overrides": words(answer)})
    return rows


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table in Markdown.

    Args:
        rows: those of :func:`halves`, with ``measured_seconds`` where they were measured.
    """
    yield "| micro-batches | played | measured |"
    yield "| --- | --- | --- |"
    steps = [(row["judged_seconds"], row.get("measured_seconds")) for row in rows]
    saved = tuple(None if None in pair else pair[0] - pair[1] for pair in zip(*steps, strict=True))
    names = (*(row["name"] for row in rows), f"saved; by the formula {formula():.3f} s")
    for name, times in zip(names, (*steps, saved), strict=True):
        yield f"| {name} | {' | '.join('-' if each is None else f'{each:.3f} s' for each in times)} |"
