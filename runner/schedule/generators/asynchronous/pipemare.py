"""PipeMare: AMPNet's order with three techniques against late gradients, each of which is a key of ``schedule``.

- ``lr_rescheduling`` K: stages whose forwards are tau > 1 steps late begin with the learning rate / tau, and have all
  of it after K steps: the rate times tau^(k / K - 1) at step k.
- ``discrepancy_correction`` C: backwards use an estimate of the weights that their forward has used. It goes back from
  the newest weights along the running mean of their changes, as many steps as the stage has made since the forward.
- ``warmup_steps``: the first steps are synchronous.

Source: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021; rescheduling as in the published
AsyncPP code, the correction and its constant from memory.
"""

from __future__ import annotations

from dataclasses import replace

from runner.options import Option
from runner.schedule.generators.asynchronous.ampnet import ampnet
from runner.schedule.generators.forms import whole_number
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "pipemare"]


def pipemare(ranks: int, microbatches: int) -> Schedule:
    """Generate the stream; arguments as of :func:`runner.schedule.generators.asynchronous.ampnet.ampnet`."""
    return replace(ampnet(ranks, microbatches), name="pipemare")


def _generate(request: ScheduleRequest) -> Schedule:
    return pipemare(request.ranks, request.microbatches)


_ELSEWHERE = "It belongs to a published way to bear late gradients, of one schedule"

SPEC = ScheduleSpec(
    name="pipemare",
    position=246,
    description="ampnet with lower learning rates at first, corrected backwards and a synchronous beginning",
    summary="`ampnet` with lower learning rates of late stages at first, backwards that use an estimate of their "
    "forward's weights, and a synchronous beginning, each by its key: one more copy of the weights "
    "and the mean of their changes",
    source="Yang et al., PipeMare, 2021; rescheduling from AsyncPP's code, the correction from memory",
    formulas=None,
    generate=_generate,
    kind="asynchronous",
    options=(
        whole_number(
            "lr_rescheduling",
            1,
            "steps until a late stage has the whole learning rate; null = at once",
            example=100,
            elsewhere=_ELSEWHERE,
            legal=(2,),
        ),
        Option(
            "discrepancy_correction",
            float,
            "C in (0, 1); null = backwards read the newest weights",
            "0.135",
            "must lie between 0 and 1",
            lambda value: not 0 < value < 1,
            why="It is what is left of a change in the mean after as many steps as forwards are late",
            elsewhere=_ELSEWHERE,
            legal=(0.5,),
        ),
        whole_number(
            "warmup_steps",
            0,
            "first steps that are flushed; null = 0",
            example=0,
            elsewhere=_ELSEWHERE,
            legal=(1,),
        ),
    ),
    searched=False,
)
