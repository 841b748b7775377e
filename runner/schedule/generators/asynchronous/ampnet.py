"""AMPNet: 1F1B that never flushes and keeps no older weights; a backward reads the newest weights of its stage.

The gradient of stage s mixes two versions: activations made with weights that lack the last D - 1 - s steps, and
products with the weights of now. A stage steps by itself after every ``schedule.microbatches`` backwards.

Source: Gaunt et al., "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks", 2017. The paper's
runtime takes messages in the order in which they arrive; the fixed order of 1F1B is that of fairscale's port, and makes
a run repeatable.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.asynchronous.streamed import newest_lags, streamed
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "ampnet"]


def ampnet(ranks: int, microbatches: int) -> Schedule:
    """Generate the stream.

    Args:
        ranks: D, at least 2.
        microbatches: T, the number of each optimizer step.
    """
    return replace(streamed("ampnet", (1,) * ranks, microbatches, newest_lags((1,) * ranks)), reads_newest=True)


SPEC = ScheduleSpec(
    name="ampnet",
    position=200,
    description="1f1b without a flush, without older weights: backwards read newer weights than their forwards",
    summary="`1f1b` without a flush, and without any second copy of the weights: a backward reads newer weights than "
    "its forward, so that its gradient belongs to no version; converges only at low learning rates",
    source="Gaunt et al., AMPNet, 2017; the order is fairscale's",
    formulas=None,
    generate=lambda request: ampnet(request.ranks, request.microbatches),
    kind="asynchronous",
    convergence="poor",
    searched=False,
)
