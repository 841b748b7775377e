"""Engines that are wrong on purpose; each is what every rank of a layout runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from runner.config.schema import RunConfig
from runner.engine.executor import Executor
from runner.engine.step_ends import StepEnds
from runner.engine.update.gradients import StageGradients
from runner.engine.update.update import Update
from runner.engine.window import Window
from runner.schedule.values import Action
from runner.training.verify.recording_rank import run_recording_rank


def stale_weight(config: RunConfig, run_dir: Path) -> None:
    """Stage 1 computes with the weights of the step before, and updates the newest."""
    right, update = Executor.run, StepEnds.step
    held: dict[int, list[torch.Tensor]] = {}

    def parameters(stages: Any) -> list[torch.nn.Parameter]:
        return [parameter for stage, module in stages.items() if stage == 1 for parameter in module.parameters()]

    def put(stages: Any, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters(stages), values, strict=True):
                parameter.copy_(value)

    def run(self: Executor, actions: Sequence[Action], failed: Any, *, training: bool = True) -> None:
        stages = self._rank.stages
        newest = [parameter.detach().clone() for parameter in parameters(stages)]
        put(stages, held.get(0, newest))
        held[0], held[1] = newest, newest
        right(self, actions, failed, training=training)

    def step(self: StepEnds, window: Window, stage: int) -> None:
        put(self._rank.stages, held[1])
        update(self, window, stage)

    with patch.object(Executor, "run", run), patch.object(StepEnds, "step", step):
        run_recording_rank(config, run_dir)


def untied_weight(config: RunConfig, run_dir: Path) -> None:
    """Stages that share a weight keep their own sums of its gradient."""

    right = StageGradients.reduce

    def reduce(self: StageGradients, transport: Any, *of_step: Any) -> list[Any]:
        return [] if self.tag is not None and self.tag.spans_stages else right(self, transport, *of_step)

    with patch.object(StageGradients, "reduce", reduce):
        run_recording_rank(config, run_dir)


def rounded_gradient(config: RunConfig, run_dir: Path) -> None:
    """Gradients are larger by a rounding error before they are applied."""
    right = Update.open

    def open_larger(self: Update, weight: float) -> None:
        right(self, weight * (1 - 2.0**-22))

    with patch.object(Update, "open", open_larger):
        run_recording_rank(config, run_dir)
