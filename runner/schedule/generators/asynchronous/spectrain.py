"""SpecTrain: AMPNet's order, with weights that are predicted along SGD's momentum before every forward and backward.

On rank k of D, a forward looks k // 2 + D - k - 1 optimizer steps ahead, and a backward k // 2, both from the weights
that are the newest then, so that both aim at the same future weights.

Source: Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform", 2018;
the gaps are those of two published ports of it.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.asynchronous.ampnet import ampnet
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "spectrain"]


def spectrain(ranks: int, microbatches: int) -> Schedule:
    """Generate the stream; arguments as of :func:`runner.schedule.generators.asynchronous.ampnet.ampnet`."""
    return replace(ampnet(ranks, microbatches), name="spectrain")


SPEC = ScheduleSpec(
    name="spectrain",
    position=242,
    description="ampnet whose weights are predicted by SGD's momentum, before every forward and backward",
    summary="`ampnet` whose forwards and backwards use weights that SGD's momentum predicts: one more copy of the "
    "weights, filled before each of them",
    source="Chen et al., SpecTrain, 2018; the gaps are those of its ports",
    formulas=None,
    generate=lambda request: spectrain(request.ranks, request.microbatches),
    kind="asynchronous",
    prediction="momentum",
    gaps="spectrain",
    data_unit="mini-batch",
    searched=False,
)
