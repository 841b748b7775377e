"""The memory of a draft whose stages are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.plan.draft import Draft
from runner.plan.memory.predict import predict_memory
from runner.plan.memory.reserved import predict_reserved
from runner.plan.reductions import reductions
from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryParts, MemoryPrediction
from runner.schedule.values import Program

__all__ = ["memory_of"]


# Bytes that no layer's profile shows, as measured in one process and in pipelines of two. They matter for tiny models.
_LOSS_OF_STEP = 24  # every rank: the sum and the weight of the step's loss, in float64, and a number that it passes on
_LOSS_OF_MICROBATCH = 28  # the last stage's rank: what the loss of a micro-batch brings; it was not taken apart


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
    predicted = predict_memory(
        program,
        draft.profile,
        figures,
        batch_samples=needs.batch_samples,
        temporaries=needs.temporaries,
        lingering=needs.lingering,
        sharing=needs.sharing,
        states_over=needs.states_over,
        flattened=needs.flattened,
        accelerated=needs.accelerated,
        extra=needs.extra,
        backup=config.schedule.post_validation,
        copied_by=draft.layout.data if config.checkpoint.asynchronous else None,
        planned_reductions=planned,
    )
    predicted = replace(
        predicted, parts=tuple(_with_scalars(draft, rank, one) for rank, one in enumerate(predicted.parts))
    )
    return replace(predicted, reserved=predict_reserved(config, draft.profile.trace, temporaries=needs.temporaries))


def _with_scalars(draft: Draft, rank: int, parts: MemoryParts) -> MemoryParts:
    last = draft.schedule.stages - 1 in draft.schedule.stages_of(rank)
    return replace(parts, buffers=parts.buffers + _LOSS_OF_STEP + (_LOSS_OF_MICROBATCH if last else 0))
