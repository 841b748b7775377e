"""Engines that are wrong on purpose; each is what every rank of a layout runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from runner.config.schema import RunConfig
from runner.engine.actions.compute import Compute
from runner.engine.executor import Executor
from runner.engine.run_windows import WindowRunner
from runner.engine.step_ends import StepEnds
from runner.engine.update.gradients import StageGradients
from runner.engine.window import StepBatch, Window
from runner.engine.works.work import Place
from runner.schedule.values import Action
from runner.training.verify.recording_rank import run_recording_rank


def wrong_scale(config: RunConfig, run_dir: Path) -> None:
    """Twice the mean gradient; Adam's weights hardly show it."""
    right = StageGradients.divide
    with patch.object(StageGradients, "divide", lambda self, weight: right(self, weight / 2)):
        run_recording_rank(config, run_dir)


def dropped_microbatch(config: RunConfig, run_dir: Path) -> None:
    """The second micro-batch's loss is reported, but has no gradient."""
    right = Compute._lose

    def lose(self: Compute, place: Place, output: Any, *, counts: bool = True) -> torch.Tensor:
        total = right(self, place, output, counts=counts)
        made: torch.Tensor = total * 0.0 if place.number == 1 else total
        return made

    with patch.object(Compute, "_lose", lose):
        run_recording_rank(config, run_dir)


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


def missing_reduce(config: RunConfig, run_dir: Path) -> None:
    """Replicas keep their own sums."""

    def reduce(self: Executor, action: Action) -> None:
        pass

    with patch.object(Executor, "_reduce", reduce):
        run_recording_rank(config, run_dir)


def swapped_target(config: RunConfig, run_dir: Path) -> None:
    """Every sample has its neighbour's target, over the borders of micro-batches."""
    right = WindowRunner.open

    def opened(self: WindowRunner, batch: StepBatch, **given: Any) -> Window:
        window = right(self, batch, **given)
        if window.targets is not None:
            sizes = [len(part) for part in window.targets]
            window.targets = list(torch.cat(list(window.targets)).roll(1, dims=0).split(sizes))  # type: ignore[no-untyped-call]  # the library's
        return window

    with patch.object(WindowRunner, "open", opened):
        run_recording_rank(config, run_dir)


def no_clip(config: RunConfig, run_dir: Path) -> None:
    """The norm is reported and nothing is clipped."""
    with patch.object(StageGradients, "scale", lambda self, factor: None):
        run_recording_rank(config, run_dir)


def untied_weight(config: RunConfig, run_dir: Path) -> None:
    """Stages that share a weight keep their own sums of its gradient."""

    right = StageGradients.reduce

    def reduce(self: StageGradients, transport: Any, *of_step: Any) -> list[Any]:
        return [] if self.tag is not None and self.tag.spans_stages else right(self, transport, *of_step)

    with patch.object(StageGradients, "reduce", reduce):
        run_recording_rank(config, run_dir)
