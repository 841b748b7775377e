"""PipeDream: 1F1B that never flushes; a forward reads the newest weights of its stage, and its backward the same ones.

With one micro-batch per optimizer step, the forward of stage s lacks the last D - 1 - s steps:
w_s(t+1) = w_s(t) - lr * gradient at (w_0(t-D+1), ..., w_s(t-D+1+s), ..., w_{D-1}(t)). The stage keeps D - s versions.
With *vertical sync* all stages read the version that the first stage reads, so that every gradient belongs to one
version of the whole model, D - 1 steps old; every stage then keeps D versions.

A stage may be on R ranks, which take its micro-batches in turns (1F1B-RR): each runs as many forwards ahead as keep all
ranks of later stages busy, and their gradients are summed before each step of the stage.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019; weight stashing and the
order are those of its published runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.asynchronous.streamed import newest_lags, streamed, streamed_problems
from runner.schedule.generators.replicated import REPLICAS, replicas_in
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPECS", "pipedream", "pipedream_vsync"]

_SOURCE = "Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019"


def pipedream(replicas: Sequence[int], microbatches: int) -> Schedule:
    """Generate the stream with weight stashing.

    Args:
        replicas: the ranks of each stage, at least 2 in all.
        microbatches: T, the number of each optimizer step; the paper's is 1.
    """
    return streamed("pipedream", replicas, microbatches, newest_lags(replicas))


def pipedream_vsync(replicas: Sequence[int], microbatches: int) -> Schedule:
    """Generate the stream with weight stashing and vertical sync; arguments as in :func:`pipedream`."""
    return streamed("pipedream_vsync", replicas, microbatches, (max(newest_lags(replicas)),) * len(replicas))


SPECS = (
    ScheduleSpec(
        name="pipedream",
        position=210,
        description="1f1b without a flush: stage s updates with gradients that are up to D - 1 - s steps late",
        summary="`1f1b` without a flush, with an optimizer step after every micro-batch or every few: idle only while "
        "it fills and drains; the first stage's gradients are D - 1 micro-batches late, its weights are there D times",
        source=_SOURCE,
        formulas=None,
        generate=lambda request: pipedream(replicas_in(request), request.microbatches),
        constraint=streamed_problems,
        options=(REPLICAS,),
        kind="asynchronous",
        data_unit="mini-batch",
        searched=False,
    ),
    ScheduleSpec(
        name="pipedream_vsync",
        position=220,
        description="pipedream whose stages all read one version of the model, which is D - 1 steps old",
        summary="`pipedream` whose stages all read one version of the model, D - 1 micro-batches old: every rank keeps "
        "its weights D times",
        source=_SOURCE + ", vertical sync",
        formulas=None,
        generate=lambda request: pipedream_vsync(replicas_in(request), request.microbatches),
        constraint=streamed_problems,
        options=(REPLICAS,),
        kind="asynchronous",
        data_unit="mini-batch",
        searched=False,
    ),
)
