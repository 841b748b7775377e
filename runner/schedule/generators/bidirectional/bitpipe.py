"""BitPipe: two Vs in opposite directions, four chunks per rank.

Source: Wu et al., BitPipe, 2024, and its schedule generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.schedule.generators.bidirectional.layout import nearer_pipe, of_pipelines
from runner.schedule.generators.forms import EVEN_RANKS, MULTIPLE_OF_RANKS, two_way
from runner.schedule.generators.layout import backward, forward, zigzag
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Action, Schedule

__all__ = ["SPEC", "bitpipe"]

_Chunk = tuple[int, int]  # pipeline and chunk: one of a rank's four chunks


def bitpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate BitPipe.

    Args:
        ranks: D, even.
        microbatches: T, a multiple of D; the first forwards of each D micro-batches fill gaps between the last
            backwards of those before.
    """
    down = zigzag(ranks, 2)
    placement = (down, tuple(ranks - 1 - rank for rank in down))
    rows = [_row(ranks, rank, microbatches) for rank in range(ranks)]
    return of_pipelines("bitpipe", placement, rows, microbatches)


def _row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    half, distance = ranks // 2, min(rank, ranks - 1 - rank)
    near, far = half - distance, distance
    own = nearer_pipe(ranks, rank)
    own1, own2, other1, other2 = (own, 0), (own, 1), (1 - own, 0), (1 - own, 1)
    forwards = [*[own1] * near, *[other1, own1] * far, *[other1, other2] * near, *[own2, other2] * far, *[own2] * near]
    backwards = [*[own2] * near, *[other2, own2] * far, *[other2, other1] * near, *[own1, other1] * far, *[own1] * near]
    row: list[Action] = []
    for first in range(0, microbatches, ranks):
        unit = in_turn(
            list(_numbered(forward, forwards, ranks, rank, first)),
            list(_numbered(backward, backwards, ranks, rank, first)),
            ranks + half + distance,
        )
        row = _joined(row, unit, near)
    return row


def _joined(row: list[Action], unit: list[Action], overlap: int) -> list[Action]:
    """Join a unit to a row: the row's last backwards alternate with the unit's first forwards."""
    if not row:
        return unit
    pairs = zip(row[-overlap:], unit[:overlap], strict=True)
    return [*row[:-overlap], *(action for pair in pairs for action in pair), *unit[overlap:]]


def _numbered(
    make: Callable[[int, int], Action], chunks: list[_Chunk], ranks: int, rank: int, first: int
) -> Iterator[Action]:
    """Give each chunk its pipeline's micro-batches in order, which are every second one."""
    taken: dict[_Chunk, int] = {}
    for pipe, chunk in chunks:
        position = ranks - 1 - rank if pipe else rank  # the position in the pipeline's own direction
        stage = 2 * ranks - 1 - position if chunk else position
        microbatch = taken.get((pipe, chunk), first + pipe)
        taken[pipe, chunk] = microbatch + 2
        yield make(stage, microbatch)


SPEC = ScheduleSpec(
    name="bitpipe",
    position=220,
    description="two Vs in opposite directions: half of chimera's bubble for twice its messages",
    summary="two Vs, both ways; twice the weights",
    source="Wu et al., BitPipe, 2024",
    formulas=two_way(
        "(D / 2 - 1) * (T / D * B - (T / D - 1) * F)", "(3 * D + 2) / 4 + min(r, D - 1 - r) / 2", when="B >= F"
    ),
    generate=lambda request: bitpipe(request.ranks, request.microbatches),
    default_chunks=2,
    chunks=Legal("2 or null, one down and one up each V", lambda ranks, chunks: chunks == 2),
    ranks=EVEN_RANKS,
    microbatches=MULTIPLE_OF_RANKS,
)
