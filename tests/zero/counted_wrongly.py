"""The model of divided layers for a runner whose norm counts whole weights on each rank that has them."""

from __future__ import annotations

from typing import Any

import tensor_models
from torch import nn

import runner.engine.update.sets as sets
import runner.strategy.zero.stage as stages
from runner.engine.update.gradients import StageGradients


def build() -> nn.Module:
    sets._counting = _count_all
    stages.DeepSpeedStage._mark = _mark_all  # type: ignore[method-assign, assignment]
    return tensor_models.build()


def _count_all(gradients: StageGradients, tags: object) -> StageGradients:
    gradients.counted = frozenset(gradients.names)
    return gradients


def _mark_all(stage: stages.DeepSpeedStage) -> None:
    for parameter in stage.module.parameters():
        given: Any = parameter
        given.model_parallel, given.ds_pipe_replicated = True, False
