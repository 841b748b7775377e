"""Lightning's trainer on the ranks that have been started, for training as for an evaluation."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback

from runner.strategy.pipeline import EngineStrategy

__all__ = ["make_trainer"]


def make_trainer(strategy: EngineStrategy, callbacks: list[Callback], **settings: Any) -> pl.Trainer:
    """The trainer of this rank: it starts no process, and leaves data, progress and checkpoints to the runner.

    Args:
        strategy: the strategy with this rank's part of the plan.
        callbacks: Lightning's callbacks in their order.
        settings: further arguments of Lightning's ``Trainer``.
    """
    world_size = strategy.plan.topology.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return pl.Trainer(
        accelerator="cuda" if strategy.root_device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=world_size // local,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if world_size > 1 else None,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
        **settings,
    )
