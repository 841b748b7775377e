"""XPipe: AMPNet's order, with weights that Adam's direction predicts twice in each optimizer step's micro-batches.

The first micro-batch of a step, the *bellwether*, predicts once before its forward and once before its backward; the
others use the same weights. On rank k of D with T micro-batches a step, the forward looks
round((D + T - k / 2 - 2) / T) steps ahead, and the backward round((T + k // 2 - 1) / T).

Source: Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", 2019; the gaps are those
of notes that quote the paper, with Python's rounding (half to even), which fairscale's port uses.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.asynchronous.ampnet import ampnet
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "xpipe"]


def xpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate the stream; arguments as of :func:`runner.schedule.generators.asynchronous.ampnet.ampnet`."""
    return replace(ampnet(ranks, microbatches), name="xpipe")


SPEC = ScheduleSpec(
    name="xpipe",
    position=244,
    description="ampnet whose weights are predicted by Adam's direction, twice for the micro-batches of a step",
    summary="`ampnet` whose forwards and backwards use weights that Adam's direction predicts, once for all forwards "
    "and once for all backwards of an optimizer step: three more copies of the weights",
    source="Guan et al., XPipe, 2019; the gaps are those of notes that quote it",
    formulas=None,
    generate=lambda request: xpipe(request.ranks, request.microbatches),
    kind="asynchronous",
    prediction="adam",
    gaps="xpipe",
    searched=False,
)
