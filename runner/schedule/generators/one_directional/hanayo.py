"""Hanayo: a schedule of waves. Each wave is a V of two chunks per rank; more waves mean less bubble, more messages.

Source: Liu et al., Hanayo, 2023. Its order has no closed form here. It is found by a simulation in which backwards go
first and take twice as long as forwards. With this rule no rank keeps more than 2 D - 1 activations.
"""

from __future__ import annotations

from runner.schedule.generators.forms import EVEN_CHUNKS
from runner.schedule.generators.layout import backward, forward, of_one_pipeline, zigzag
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.simulation.clock import Costs
from runner.schedule.simulation.list_scheduling import Clock, list_schedule
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "hanayo"]


def hanayo(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Generate Hanayo with ``chunks / 2`` waves.

    Args:
        ranks, microbatches: D and T.
        chunks: number of chunks per rank, even.
    """
    placement = zigzag(ranks, chunks)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement):
        rows[rank] += [make(stage, m) for m in range(microbatches) for make in (forward, backward)]
    draft = of_one_pipeline("hanayo", placement, rows, microbatches)

    def urgency(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
        """Backwards go first, from the earliest stage; then forwards, from the latest; oldest micro-batch first."""
        microbatch = action.microbatch or 0
        if action.op is Op.B:
            return 0, action.stage, microbatch
        return 1, -action.stage, microbatch

    return list_schedule(draft, Costs().per_stage(draft.stages, chunks), urgency)


SPEC = ScheduleSpec(
    name="hanayo",
    position=140,
    description="waves: schedule.chunks / 2 of them, each a V; more waves, smaller bubble, more messages",
    summary="waves, as many as half of `schedule.chunks`",
    source="Liu et al., Hanayo, 2023",
    formulas=None,
    generate=lambda request: hanayo(request.ranks, request.microbatches, request.chunks or 2),
    default_chunks=2,
    chunks=EVEN_CHUNKS,
)
