"""A training rank that records its gradients and weights: see :mod:`runner.training.verify.recorded_tensors`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.plan.values import RunPlan
from runner.strategy.pipeline import EngineStrategy
from runner.strategy.whole_tensors import joined
from runner.training.run import run_rank
from runner.training.verify.recorded_tensors import gradients_of, recorded_steps, weights_of, write_tensors

__all__ = ["run_recording_rank"]


def run_recording_rank(config: RunConfig, run_dir: Path) -> bool:
    """Run one rank of a training run, without validation, and record its gradients and weights.

    Returns:
        whether a signal stopped the run before its last step.
    """
    steps = recorded_steps(config, RunPlan.load(run_dir).profile)
    return run_rank(config, run_dir, watchers=[_Recorder(run_dir, steps)], validate=False)


class _Recorder(Callback):
    def __init__(self, run_dir: Path, steps: range) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Copy the gradients now, because the engine clears them after the update."""
        found = [pair for stage in _stages(trainer) for pair in gradients_of(stage).items()]
        # Where windows overlap, each stage is updated by itself, and only its own gradients are there.
        self._gradients |= {name: gradient.detach().clone() for name, gradient in found}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step in self._steps:
            strategy = trainer.strategy
            assert isinstance(strategy, EngineStrategy)
            if strategy.last_step is not None and strategy.last_step.skipped:
                self._gradients = {}  # those of a step before: none were applied
            tags = strategy.engine.tags if strategy.engine is not None else {}
            self._gradients = {name: each for name, each in self._gradients.items() if name in tags}  # layers may move
            with torch.no_grad(), strategy.whole_weights():
                weights = {name: tensor for stage in _stages(trainer) for name, tensor in _compared(trainer, stage)}
                own = [_whole(strategy, tensors) for tensors in (self._gradients, weights)]
                write_tensors(self._run_dir, trainer.global_step, trainer.global_rank, *own)


def _whole(strategy: EngineStrategy, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors; parts are put together on the first of the ranks that divide them, and others leave them out."""
    assert strategy.engine is not None
    tags = strategy.engine.tags
    found = joined(named, strategy.engine)
    return found or {name: each for name, each in named.items() if name not in tags or tags[name].shard is None}


def _compared(trainer: pl.Trainer, stage: StageModule) -> Iterable[tuple[str, Tensor]]:
    """The tensors that are equal on all replicas; for the first replica also its buffers."""
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    state = weights_of(stage)
    if not strategy.replica:
        return state.items()
    parameters = {stage.global_name(name) for name, _ in stage.named_parameters(remove_duplicate=False)}
    return [(name, tensor) for name, tensor in state.items() if name in parameters]


def _stages(trainer: pl.Trainer) -> list[StageModule]:
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    assert strategy.engine is not None
    return [strategy.engine.stages[stage] for stage in sorted(strategy.engine.stages)]
