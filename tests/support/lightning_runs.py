"""The strategy in one process, driven by a Lightning Trainer of the test's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from narrow import present

from runner.config.compose.resolve import resolve
from runner.engine.engine import EngineOptions
from runner.engine.window import StepBatch
from runner.model.data import load_datasets, load_loss
from runner.model.make import load_layers
from runner.plan.make import make_plan
from runner.profile import ModelProfile
from runner.profiling.model import dtype_of, profile_model
from runner.strategy.pipeline import EngineStrategy
from runner.training.data.loading import make_loader
from runner.training.module import LayersModule

Outputs = torch.Tensor | Mapping[str, Any] | None  # of a training step, as Lightning hands them to callbacks
USER = ("model.target=user_code:model", "data.target=user_code:points", "loss.target=user_code:mean")


class Losses(Callback):
    """What a user's callback sees of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Outputs, batch: StepBatch, batch_idx: int
    ) -> None:
        assert isinstance(outputs, Mapping)
        self.seen.append(outputs["loss"].item())
        self.steps.append(trainer.global_step)


def fit(
    *overrides: str,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Path | None = None,
    profile: ModelProfile | None = None,
    **trainer_options: Any,
) -> tuple[Any, LayersModule, list[float]]:
    """Train; returns the trainer, the module and the strategy's loss of each step.

    ``profile`` is that of the model, if the overrides name another one than this folder's.
    """
    config = resolve([*USER, "logger=none", "data.batch_size=8", "data.shuffle=false", "device=cpu", *overrides])
    plan = make_plan(config, profile or _profile())
    options = EngineOptions(
        microbatches=config.schedule.microbatches,
        dtype=dtype_of(config.precision.name),
        seed=config.seed,
        clip_norm=config.trainer.grad_clip_norm,
        offload_drive=Path(config.offload.drive) if config.offload.drive is not None else None,
    )
    strategy = EngineStrategy(plan, options)
    data = load_datasets(config.data, config.seed)
    common: dict[str, Any] = {"batch_size": 8, "data": 1, "replica": 0, "inputs": True, "targets": True, "seed": 0}
    training, validation = (
        make_loader(each, len(each), shuffle=False, **common) for each in (data.train, present(data.validation))
    )
    module = LayersModule(load_layers(config.model, config.seed), load_loss(config.loss), config)
    exact = _Exact()
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": strategy,
            "max_steps": config.trainer.max_steps,
            "max_epochs": -1,
            "check_val_every_n_epoch": None,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "log_every_n_steps": 1,
            "enable_checkpointing": any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "inference_mode": False,
            "callbacks": [exact, *callbacks],
            **trainer_options,
        }
    )
    trainer.fit(module, training, validation, ckpt_path=ckpt_path, weights_only=False)
    return trainer, module, exact.losses


@cache
def _profile() -> ModelProfile:
    """Of the user's model at its defaults: on one rank the plan is the same for every batch and precision."""
    return profile_model(resolve([*USER, "data.batch_size=8", "device=cpu"]))


class _Exact(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Outputs, batch: StepBatch, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, EngineStrategy)
        self.losses.append(present(trainer.strategy.last_step).loss)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = trainer.strategy.lightning_module_state_dict()
    return made
