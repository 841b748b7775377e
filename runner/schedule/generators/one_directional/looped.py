"""Schedules with looping placement: several chunks per rank, stage s on rank s mod D."""

from __future__ import annotations

from runner.schedule.generators.forms import ANY_CHUNKS, looped
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Action, Schedule

__all__ = ["SPECS", "group_size", "interleaved_1f1b", "looped_bfs"]


def group_size(ranks: int, microbatches: int) -> int | None:
    """Number of micro-batches that a rank runs through one chunk before the next chunk; None if no number divides T.

    It is the number of ranks if that divides the micro-batches (Narayanan et al., 2021), else the smallest larger
    number with the same number of groups, which is the relaxation of torch.distributed.pipelining.
    """
    groups = max(1, microbatches // ranks)
    return None if microbatches % groups else microbatches // groups


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Generate 1F1B over several chunks per rank, for one group of micro-batches after the other.

    Source: Narayanan et al., Megatron-LM, 2021. If all micro-batches are one group, the order follows the same rule, as
    in torch; Megatron then runs all forwards first.

    Args:
        ranks, chunks: D and v.
        microbatches: T, for which :func:`group_size` must not be None.
    """
    group = group_size(ranks, microbatches)
    assert group is not None  # the registry refuses other requests
    rows = []
    for rank in range(ranks):
        # block after block of one group and one chunk: forwards from the first chunk up, backwards from the last down
        stages = [rank + chunk * ranks for chunk in range(chunks)]
        blocks = [range(first, first + group) for first in range(0, microbatches, group)]
        forwards = [forward(stage, m) for block in blocks for stage in stages for m in block]
        backwards = [backward(stage, m) for block in blocks for stage in reversed(stages) for m in block]
        rows.append(in_turn(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * group))
    return of_one_pipeline("interleaved_1f1b", looping(ranks, chunks), rows, microbatches)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Generate the breadth-first order: all micro-batches through a chunk before the next; backwards reverse it.

    Each chunk's weights are used in one period per direction, which is good for weights that are sharded or come from
    the host's memory. On one rank, where nobody waits for a micro-batch, the backwards of a chunk keep the order of the
    micro-batches, so that gradients are added as in one process.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023; torch's ScheduleLoopedBFS.
    """
    rows: list[list[Action]] = []
    for rank in range(ranks):
        row = [forward(rank + chunk * ranks, m) for chunk in range(chunks) for m in range(microbatches)]
        back = [(action.stage, action.microbatch or 0) for action in reversed(row)]
        if ranks == 1:
            back.sort(key=lambda of: (-of[0], of[1]))
        rows.append(row + [backward(*of) for of in back])
    return of_one_pipeline("looped_bfs", looping(ranks, chunks), rows, microbatches)


SPECS = (
    ScheduleSpec(
        name="interleaved_1f1b",
        position=50,
        description="1f1b over several chunks per rank: 1 / v of its bubble, v times its messages",
        summary="several stages per rank: less idle, more messages",
        source="Narayanan et al., Megatron-LM, 2021; torch's ScheduleInterleaved1F1B",
        formulas=looped("min(v * T, 2 * (D - 1 - r) + (v - 1) * T // max(1, T // D) + 1) / v"),
        generate=lambda request: interleaved_1f1b(request.ranks, request.microbatches, request.chunks or 2),
        default_chunks=2,
        chunks=ANY_CHUNKS,
        microbatches=Legal(
            "a multiple of max(1, T // D), the number of groups",
            lambda ranks, microbatches: group_size(ranks, microbatches) is not None,
        ),
    ),
    ScheduleSpec(
        name="looped_bfs",
        position=60,
        description="breadth first: all micro-batches through a chunk, then the next; weights are used in one stretch",
        summary="`interleaved_1f1b` breadth first: a stage's weights are used in one stretch",
        source="Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023; torch's ScheduleLoopedBFS",
        formulas=looped("T"),
        generate=lambda request: looped_bfs(request.ranks, request.microbatches, request.chunks or 2),
        default_chunks=2,
        chunks=ANY_CHUNKS,
        one_rank=True,
    ),
)
