"""GEMS: two copies of the model in opposite directions, with one micro-batch of each alive at a time.

Source: Jain et al., GEMS, 2020. Micro-batches go down and up in turn. Each rank runs F and then B of one micro-batch at
a time. The next micro-batch's forward follows the backward of the one before through the ranks, so at most two are
alive.
"""

from __future__ import annotations

from runner.schedule.generators.bidirectional.layout import of_pipelines
from runner.schedule.generators.forms import two_way
from runner.schedule.generators.layout import backward, forward
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "gems"]


def gems(ranks: int, microbatches: int) -> Schedule:
    """Generate GEMS.

    Args:
        ranks: D. If it is odd, the middle rank holds its stage once, for both directions.
        microbatches: T, at least 2, one for each direction.
    """
    down = tuple(range(ranks))
    rows = [
        [make(stage, m) for m in range(microbatches) for stage in [(rank, ranks - 1 - rank)[m % 2]] for make in both]
        for rank in down
        for both in [(forward, backward)]
    ]
    return of_pipelines("gems", (down, down[::-1]), rows, microbatches)


SPEC = ScheduleSpec(
    name="gems",
    position=190,
    description="one micro-batch at a time, down and up in turn: the least activations, for twice the weights",
    summary="down and up in turn; twice the weights",
    source="Jain et al., GEMS, 2020",
    formulas=two_way("(D - 1) * (T * B + F)", "1", "(D - 1) * (T * B + F * (T % 2))", when="B >= F"),
    generate=lambda request: gems(request.ranks, request.microbatches),
    microbatches=Legal("at least 2, one down and one up", lambda ranks, microbatches: microbatches >= 2),
)
