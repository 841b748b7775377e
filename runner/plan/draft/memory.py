"""The memory of a draft whose stages are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.config.precision import PRECISIONS
from runner.plan.draft.draft import Draft
from runner.plan.memory.predict import predict_memory, steps_under_way
from runner.plan.reductions import reductions
from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryParts, MemoryPrediction
from runner.schedule.values import Program

__all__ = ["memory_of"]


# Bytes that no layer's profile shows. They matter for tiny models.
_LOSS_OF_STEP = 16  # every rank, for each step that is under way: the sum and the weight of its loss, in float64
_HEADER = 48  # every rank but the last: six numbers of the step, which are on their way to the next rank
_UPDATE = 16  # every rank, at most: numbers that an optimizer's update makes as tensors, such as its rate
_ASKS = 8  # the last rank: one number of them, which is on its way to the rank of the last stage
_LOSS_OF_MICROBATCH = 28  # the last stage's rank: what the loss of a micro-batch brings; it was not taken apart
_WIDE_LOSS = 4  # more of it if the loss is computed in fp64


def memory_of(draft: Draft, program: Program, figures: Sequence[StageFigures]) -> MemoryPrediction:
    """The memory of each rank.

    Args:
        draft: the request and what follows from it.
        program: the lowered schedule.
        figures: the figures of each stage.
    """
    config, needs = draft.config, draft.needs
    compresses = config.compression.name != "none"
    planned = reductions(config, draft.profile, figures, draft.schedule) if compresses else ()
    predicted = predict_memory(program, draft.profile, figures, needs, planned)
    if config.offload.drive is not None:
        predicted = replace(predicted, host=_without_files(draft, predicted.host, figures))
    steps = steps_under_way(program)
    return replace(
        predicted,
        parts=tuple(_with_scalars(draft, rank, steps, one) for rank, one in enumerate(predicted.parts)),
        of_replicas=tuple(
            tuple(_with_scalars(draft, rank, steps, one) for one in own)
            for rank, own in enumerate(predicted.of_replicas)
        ),
    )


def _without_files(draft: Draft, host: Sequence[int], figures: Sequence[StageFigures]) -> tuple[int, ...]:
    """What ranks have in their hosts' memory if weights that are at home are in files; gradients and states are not."""
    own = (draft.schedule.stages_of(rank) for rank in range(draft.schedule.ranks))
    files = (sum(figures[stage].home_weight_bytes for stage in stages) for stages in own)
    return tuple(max(0, held - num_bytes) for held, num_bytes in zip(host, files, strict=True))


def _with_scalars(draft: Draft, rank: int, steps: int, parts: MemoryParts) -> MemoryParts:
    """Add the losses of so many steps that are under way at once, and the messages about steps."""
    schedule = draft.schedule
    ends = (schedule.placement[0][0] - 1) % schedule.ranks  # where the messages about a step end, that begin before it
    scalars = steps * _LOSS_OF_STEP + _UPDATE + (_ASKS if rank == ends else _HEADER)
    if schedule.stages - 1 in schedule.stages_of(rank):
        is_wide = PRECISIONS[draft.config.precision.name].weights == "float64"
        scalars += _LOSS_OF_MICROBATCH + (_WIDE_LOSS if is_wide else 0)
    return replace(parts, buffers=parts.buffers + scalars)
