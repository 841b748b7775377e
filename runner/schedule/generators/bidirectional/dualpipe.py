"""DualPipe: micro-batches enter at both ends, and weight gradients fill the rest of the bubble.

Source: DeepSeek-AI, DualPipe, 2025. DualPipe computes pairs of a forward and a backward together, so that the messages
of one overlap with the compute of the other; here they come one after the other.
"""

from __future__ import annotations

from runner.schedule.generators.bidirectional.layout import nearer_pipe, of_pipelines
from runner.schedule.generators.forms import EVEN_RANKS, two_way
from runner.schedule.generators.one_directional.dualpipe_v import fill_dual_row
from runner.schedule.generators.one_directional.v_row import VRow
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "dualpipe"]


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate DualPipe; each half of the ranks is a V that turns at the middle, because both halves are mirrored.

    Args:
        ranks: D, even.
        microbatches: even, at least 2 D.
    """
    down = tuple(range(ranks))
    rows = []
    for rank in down:
        near = nearer_pipe(ranks, rank)
        stages = (rank, ranks - 1 - rank)
        row = VRow((stages[near], stages[1 - near]), first=(near, 1 - near), stride=2)
        rows.append(fill_dual_row(row, ranks // 2, min(stages), microbatches // 2).actions)
    return of_pipelines("dualpipe", (down, down[::-1]), rows, microbatches)


SPEC = ScheduleSpec(
    name="dualpipe",
    position=210,
    description="micro-batches enter at both ends, weight gradients fill the rest; pairs of F and B in turn",
    summary="both ways, forwards and backwards in pairs; twice the weights",
    source="DeepSeek-AI, DualPipe, 2025",
    formulas=two_way("(D / 2 - 1) * F", "D + 1", when="F == I == W and B == I + W"),
    generate=lambda request: dualpipe(request.ranks, request.microbatches),
    ranks=EVEN_RANKS,
    microbatches=Legal(
        "even, at least 2 D", lambda ranks, microbatches: microbatches % 2 == 0 and microbatches >= 2 * ranks
    ),
)
