"""The memory of a draft whose stages are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.plan.draft import Draft
from runner.plan.memory.predict import predict_memory
from runner.plan.memory.reserved import predict_reserved
from runner.plan.reductions import reductions
from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryPrediction
from runner.schedule.values import Program

__all__ = ["memory_of"]


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
        sharing=needs.sharing,
        states_over=needs.states_over,
        flattened=needs.flattened,
        accelerated=needs.accelerated,
        extra=needs.extra,
        backup=config.schedule.post_validation,
        copied_by=draft.layout.data if config.checkpoint.asynchronous else None,
        planned_reductions=planned,
    )
    return replace(predicted, reserved=predict_reserved(config, draft.profile.trace, temporaries=needs.temporaries))
