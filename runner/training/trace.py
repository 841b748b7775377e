"""What a layout and one process are compared by: gradients as the optimizer gets them, and weights after each step.

Every rank writes ``<run_dir>/trace/step-<k>/rank-<r>.safetensors`` with the tensors ``gradient/<name>`` and
``weight/<name>`` of its stages; steps count from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.plan.profile import ModelProfile, read_profile
from runner.strategy.pipeline import PipelineStrategy
from runner.training.run import run_rank

__all__ = ["TRACE_DIRECTORY", "gradients_of", "run_traced_rank", "traced_steps", "weights_of", "write_trace"]

TRACE_DIRECTORY = "trace"
_MOST_BYTES = 4 << 30


def run_traced_rank(config: RunConfig, run_dir: Path) -> None:
    """One rank of a training run that leaves its trace."""
    steps = traced_steps(config, read_profile(run_dir))
    run_rank(config, run_dir, watchers=[_Trace(run_dir, steps)], validate=False)


def traced_steps(config: RunConfig, profile: ModelProfile) -> range:
    """The steps that are traced: all, or of a large model the last one."""
    weights = sum(layer.weight_bytes + layer.gradient_bytes for layer in profile.layers)
    last = config.trainer.max_steps
    copies = 1 + config.parallelism.data  # one more of the single process
    return range(1, last + 1) if weights * copies * last <= _MOST_BYTES else range(last, last + 1)


def weights_of(module: StageModule) -> dict[str, Tensor]:
    """Parameters and persistent buffers by global name."""
    return module.global_state()


def gradients_of(module: StageModule) -> dict[str, Tensor]:
    """Gradients by the parameters' global names."""
    return {
        module.global_name(name): parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def write_trace(
    run_dir: Path, step: int, rank: int, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Write one rank's part of a step."""
    directory = run_dir / TRACE_DIRECTORY / f"step-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"gradient/{name}": tensor for name, tensor in gradients.items()}
    tensors |= {f"weight/{name}": tensor for name, tensor in weights.items()}
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, directory / f"rank-{rank}.safetensors")


class _Trace(Callback):
    def __init__(self, run_dir: Path, steps: range) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The engine clears them after the update."""
        found = [pair for stage in _stages(trainer) for pair in gradients_of(stage).items()]
        self._gradients = {name: gradient.detach().clone() for name, gradient in found}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step in self._steps:
            with torch.no_grad():
                weights = {name: tensor for stage in _stages(trainer) for name, tensor in weights_of(stage).items()}
                write_trace(self._run_dir, trainer.global_step, trainer.global_rank, self._gradients, weights)


def _stages(trainer: pl.Trainer) -> list[StageModule]:
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.engine is not None
    return [strategy.engine.stages[stage] for stage in sorted(strategy.engine.stages)]
