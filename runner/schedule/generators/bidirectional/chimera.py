"""Chimera: pipelines in both directions, each of which fills the other's bubble.

Source: Li and Hoefler, Chimera, 2021. A unit is D micro-batches; units follow each other at the distance of their work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runner.schedule.generators.bidirectional.layout import of_pipelines
from runner.schedule.generators.layout import backward, forward
from runner.schedule.values import Action, Schedule

__all__ = ["chimera", "chimera_in_pairs", "chimera_placement"]


def chimera_placement(ranks: int, pipes: int) -> list[tuple[int, ...]]:
    """Stage -> rank of each pipeline: half of them down, half up, each pair D / (pipes / 2) ranks further on."""
    shifts = range(0, ranks, 2 * ranks // pipes)
    down = [tuple((shift + stage) % ranks for stage in range(ranks)) for shift in shifts]
    up = [tuple((shift + ranks - 1 - stage) % ranks for stage in range(ranks)) for shift in shifts]
    return [row for pair in zip(down, up, strict=True) for row in pair]


def chimera(ranks: int, microbatches: int, pipes: int) -> Schedule:
    """Chimera by direct concatenation of its units.

    Written down from slots in which F and B take one each, and in which no two actions of a rank meet: the k-th
    micro-batch of a pipeline enters at slot 2 k, goes through one stage a slot and turns round. Two neighbouring
    pipelines of a rank use slots of different parity, and two of one direction different stretches of time.

    Args:
        ranks: D, even.
        microbatches: a multiple of D.
        pipes: 2 f, where f divides D / 2.
    """
    placement = chimera_placement(ranks, pipes)
    per_unit = ranks // pipes  # micro-batches of one pipeline
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for number in range(microbatches):
        entry, pipe = divmod(number, pipes)
        unit, k = divmod(entry, per_unit)
        start = 2 * (ranks * unit + k)
        for stage, rank in enumerate(placement[pipe]):
            slots[rank].append((start + stage, forward(stage, number)))
            slots[rank].append((start + 2 * ranks - 1 - stage, backward(stage, number)))
    rows = [[action for _, action in sorted(row)] for row in slots]
    return of_pipelines("chimera", placement, rows, microbatches)


def chimera_in_pairs(ranks: int, microbatches: int, pipes: int, *, halves: bool) -> Schedule:
    """Chimera whose forwards take two micro-batches as one, and whose backwards take one each.

    Where a backward takes twice as long as a forward, both then fill equal slots, and units follow each other without
    a gap: forward doubling. With ``halves`` the two are the halves of one micro-batch: backward halving.

    Args:
        ranks: D, even.
        microbatches: a multiple of D; of 2 D without ``halves``.
        pipes: 2 f, where f divides D / 2.
        halves: cut each micro-batch in two.
    """
    whole = chimera(ranks, microbatches if halves else microbatches // 2, pipes)
    return replace(
        whole,
        pipeline_of_microbatch=tuple(row for row in whole.pipeline_of_microbatch for _ in range(2)),
        actions=tuple(tuple(_in_pairs(row)) for row in whole.actions),
        joined=2,
        parts=2 if halves else 1,
    )


def _in_pairs(row: Iterable[Action]) -> Iterable[Action]:
    for action in row:
        number = action.microbatch or 0
        yield from (action._replace(microbatch=2 * number + which) for which in range(2))
