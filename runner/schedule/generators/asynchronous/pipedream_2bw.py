"""PipeDream-2BW: 1F1B that never flushes, with two buffered versions of the weights.

In every stage, window w reads the weights after w - 1 optimizer steps, so that all gradients of a window belong to one
version: w(t+1) = w(t) - lr * gradient at w(t-1). A stage steps after its last backward of a window. At that time it has
already begun forwards of the next window, which read the version before that step.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021. The paper requires T >= D; D - 1
micro-batches are enough for every version to exist when it is read.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.catalogue.kinds import Legal, ScheduleSpec
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.values import Schedule

__all__ = ["SPEC", "pipedream_2bw"]

_WINDOWS = 6  # the pipeline fills in the first windows, then repeats itself, and drains in the last one


def pipedream_2bw(ranks: int, microbatches: int) -> Schedule:
    """Generate the first windows of the stream.

    Args:
        ranks: D, at least 2.
        microbatches: T, the number of each optimizer step, at least D - 1.
    """
    numbers = range(_WINDOWS * microbatches)
    rows = [
        in_turn([forward(rank, m) for m in numbers], [backward(rank, m) for m in numbers], ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return replace(
        of_one_pipeline("pipedream_2bw", looping(ranks, 1), rows, len(numbers)),
        window_of_microbatch=tuple(m // microbatches for m in numbers),
        delays=(1,) * ranks,
    )


SPEC = ScheduleSpec(
    name="pipedream_2bw",
    position=230,
    description="1f1b without a flush: no bubble but at the start; every gradient is one optimizer step late",
    summary="`1f1b` without a flush: idle only while it fills and drains; every gradient is one optimizer step late, "
    "and the weights are there twice",
    source="Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021",
    formulas=None,
    generate=lambda request: pipedream_2bw(request.ranks, request.microbatches),
    microbatches=Legal("at least D - 1", lambda ranks, microbatches: microbatches >= ranks - 1),
    kind="asynchronous",
    searched=False,
)
