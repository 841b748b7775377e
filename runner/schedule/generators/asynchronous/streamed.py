"""1F1B that never flushes, as a stream of windows: the order that several asynchronous schedules share.

On rank r of D, D - 1 - r forwards come first; then one forward and one backward in turn. A stage makes its optimizer
step after its last backward of a window. So the forward of micro-batch m comes when exactly the backwards of the
micro-batches before m - (D - 1 - r) are done: the newest weights that it can read lack the steps of the others.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.values import Schedule

__all__ = ["newest_lags", "streamed"]

_WINDOWS_THAT_REPEAT = 4  # after those in which the pipeline fills, and with those in which it drains


def streamed(name: str, ranks: int, microbatches: int, lags: tuple[int, ...]) -> Schedule:
    """Generate the first windows of the stream, as many as show how it repeats itself.

    Args:
        name: the schedule's name.
        ranks: D, at least 2.
        microbatches: T, the number of each optimizer step.
        lags: see :class:`runner.schedule.values.Schedule`.
    """
    windows = 2 * -(-(ranks - 1) // microbatches) + _WINDOWS_THAT_REPEAT
    numbers = range(windows * microbatches)
    rows = [
        in_turn([forward(rank, m) for m in numbers], [backward(rank, m) for m in numbers], ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return replace(
        of_one_pipeline(name, looping(ranks, 1), rows, len(numbers)),
        window_of_microbatch=tuple(m // microbatches for m in numbers),
        lags=lags,
    )


def newest_lags(ranks: int) -> tuple[int, ...]:
    """Per stage, the lag of a forward that reads the newest weights: D - 1 - s."""
    return tuple(ranks - 1 - stage for stage in range(ranks))
