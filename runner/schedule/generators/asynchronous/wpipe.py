"""WPipe: two groups of stages that update in turn, so that only one of them reads older weights.

Every rank has two stages: r of the first group, D + r of the second. The forwards go through the groups block by block
of T micro-batches, and never flush. The second group's gradients of a window are there before its forwards of the next
one begin: it reads its newest weights, and keeps one version. The first group's forwards of the next window come before
its backwards of this one: it reads the weights after one step less, and keeps two versions.

w_0(t+1) = w_0(t) - lr * gradient at (w_0(t-1), w_1(t)), and w_1(t+1) = w_1(t) - lr * gradient at the same.

Source: Yang et al., "Group-Based Interleaved Pipeline Parallelism for Large-Scale DNN Training", 2022. This order is
reconstructed from its text: the original may put stages on ranks in another way, and may need fewer micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "wpipe"]

_WINDOWS = 6


def wpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate the first windows of the stream, as many as show how it repeats itself.

    Args:
        ranks: D, at least 2.
        microbatches: T, the number of each optimizer step, at least 2 D - 2.
    """
    rows = [
        in_turn(
            [forward(stage, m) for stage, m in _blocks((rank, ranks + rank), microbatches)],
            [backward(stage, m) for stage, m in _blocks((ranks + rank, rank), microbatches)],
            microbatches + 2 * (ranks - 1 - rank),
        )
        for rank in range(ranks)
    ]
    count = _WINDOWS * microbatches
    return replace(
        of_one_pipeline("wpipe", looping(ranks, 2), rows, count),
        window_of_microbatch=tuple(m // microbatches for m in range(count)),
        lags=(microbatches,) * ranks + (0,) * ranks,
    )


def _blocks(stages: tuple[int, int], microbatches: int) -> list[tuple[int, int]]:
    """Stage and micro-batch of each action: a window's micro-batches in one stage, then in the other."""
    windows = [range(window * microbatches, (window + 1) * microbatches) for window in range(_WINDOWS)]
    return [(stage, m) for window in windows for stage in stages for m in window]


SPEC = ScheduleSpec(
    name="wpipe",
    position=240,
    description="two stages per rank, updated in turn: half of the weights are one optimizer step late, the others not",
    summary="two stages per rank, without a flush: the gradients of the first half of the model are one optimizer step "
    "late, and its weights are there twice; the second half's are not",
    source="Yang et al., WPipe, 2022; the order is a reconstruction",
    formulas=None,
    generate=lambda request: wpipe(request.ranks, request.microbatches),
    default_chunks=2,
    chunks=Legal("2 or null", lambda ranks, chunks: chunks == 2),
    microbatches=Legal("at least 2 D - 2", lambda ranks, microbatches: microbatches >= 2 * ranks - 2),
    kind="asynchronous",
    searched=False,
)
