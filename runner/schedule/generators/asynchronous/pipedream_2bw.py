"""PipeDream-2BW: 1F1B that never flushes, with two buffered versions of the weights.

In every stage, window w reads the weights after w - 1 optimizer steps, so that all gradients of a window belong to one
version: w(t+1) = w(t) - lr * gradient at w(t-1). A stage steps after its last backward of a window. At that time it has
already begun forwards of the next window, which read the version before that step.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021. The paper requires T >= D; D - 1
micro-batches are enough for every version to exist when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.asynchronous.streamed import streamed, streamed_problems
from runner.schedule.generators.replicated import REPLICAS, replicas_in
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "pipedream_2bw"]


def pipedream_2bw(replicas: Sequence[int], microbatches: int) -> Schedule:
    """Generate the stream: every forward reads the weights that the window before its own has read last.

    Args:
        replicas: the ranks of each stage, at least 2 in all.
        microbatches: T, the number of each optimizer step, at least D - 1.
    """
    return streamed("pipedream_2bw", replicas, microbatches, (microbatches,) * len(replicas))


SPEC = ScheduleSpec(
    name="pipedream_2bw",
    position=230,
    description="1f1b without a flush: no bubble but at the start; every gradient is one optimizer step late",
    summary="`1f1b` without a flush: idle only while it fills and drains; every gradient is one optimizer step late, "
    "and the weights are there twice",
    source="Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021",
    formulas=None,
    generate=lambda request: pipedream_2bw(replicas_in(request), request.microbatches),
    constraint=streamed_problems,
    options=(REPLICAS,),
    microbatches=Legal("at least D - 1", lambda ranks, microbatches: microbatches >= ranks - 1),
    kind="asynchronous",
    searched=False,
)
