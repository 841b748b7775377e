"""One rank of a training run, from its configuration to its part of the record."""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.engine.engine import EngineOptions
from runner.engine.loss_scale import LossScaling
from runner.model.data import Datasets, load_datasets, load_loss
from runner.model.device import device_memory_bytes, device_type
from runner.model.layers import load_layers
from runner.model.profile import autocast_of, dtype_of
from runner.plan.make import make_plan
from runner.plan.profile import ModelProfile, read_profile
from runner.plan.values import RunPlan
from runner.record import RunRecord, StepLog
from runner.strategy.pipeline import PipelineStrategy
from runner.training.averaging import WeightAveraging
from runner.training.callbacks import (
    BeforeFirstStep,
    Checkpoints,
    ProgressBar,
    StepClock,
    ValidateAtEnd,
    progress,
)
from runner.training.finish import finish
from runner.training.loading import make_loader
from runner.training.loggers import build_logger, build_profiler
from runner.training.module import LayersModule
from runner.training.prediction import measured_plan

__all__ = ["run_rank"]

logger = logging.getLogger(__name__)


def run_rank(config: RunConfig, run_dir: Path) -> None:
    """Train as this process's rank; called on every rank, with torch.distributed initialised where there are several.

    Rank 0 writes the prediction into ``record.json`` before the first step, a line per step into ``steps.jsonl``, and
    the whole record at the end.

    Raises:
        RequestError: the user's model, data or loss is not what it must be.
        RunFailedError: a step failed.
    """
    rank = int(os.environ.get("RANK", "0"))
    _set_up_logging(rank)
    profile = read_profile(run_dir)
    plan = make_plan(config, profile, device_memory_bytes=device_memory_bytes(config))
    strategy = _strategy(config, plan)
    datasets, lengths = _load_data(config, plan, rank)
    module = LayersModule(load_layers(config.model, config.seed), load_loss(config.loss), config)
    loaders = _loaders(config, plan, rank, datasets, lengths)
    clock = StepClock(StepLog(run_dir) if rank == 0 else None, config.data.batch_size)
    checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint.every, config.checkpoint.keep, clock.start)
    plans = [plan]

    def predict(trainer: pl.Trainer) -> None:
        plans.append(_predict(strategy, config, profile, run_dir, next(iter(loaders[0]))))
        clock.start()

    average = WeightAveraging(config.trainer.ema_decay) if config.trainer.ema_decay is not None else None
    callbacks: list[Callback] = [
        *([average] if average is not None else []),
        BeforeFirstStep(predict),
        clock,
        ValidateAtEnd(),
        checkpoints,
        *progress(config.trainer.progress, rank),
    ]
    trainer = _trainer(config, run_dir, strategy, callbacks, has_validation=loaders[1] is not None)
    trainer.fit(module, *loaders)
    finish(trainer, module, config, run_dir, plans[-1], clock, checkpoints, average)


def _set_up_logging(rank: int) -> None:
    """Rank 0 speaks. Lightning's advice to people who configure it by hand is not for the runner's users."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*(does not have many workers|isinstance\(treespec).*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _strategy(config: RunConfig, plan: RunPlan) -> PipelineStrategy:
    options = EngineOptions(
        microbatches=config.schedule.microbatches,
        dtype=dtype_of(config.precision.name),
        seed=config.seed,
        clip_norm=config.trainer.grad_clip_norm,
        clip_value=config.trainer.grad_clip_value,
        autocast=autocast_of(config.precision.name),
        scaling=_scaling(config),
        skip_nonfinite=config.trainer.on_nonfinite == "skip",
    )
    timeout = config.launcher.step_timeout_seconds
    return PipelineStrategy(plan, options, device=device_type(config), timeout_seconds=timeout)


def _scaling(config: RunConfig) -> LossScaling | None:
    section = config.precision
    if not PRECISIONS[section.name].loss_scaling:
        return None
    return LossScaling(
        initial_scale=section.initial_scale,
        growth_interval=section.growth_interval,
        growth_factor=section.growth_factor,
        backoff_factor=section.backoff_factor,
        minimum_scale=section.minimum_scale,
        samples=config.data.batch_size,
    )


def _ends(plan: RunPlan, rank: int) -> tuple[bool, bool]:
    """Whether this rank has the first stage, and the last."""
    stages = plan.topology.stages_of(rank)
    return 0 in stages, plan.schedule.stages - 1 in stages


def _load_data(config: RunConfig, plan: RunPlan, rank: int) -> tuple[Datasets | None, tuple[int, int]]:
    """The datasets on ranks that need them, and their lengths on every rank."""
    datasets = load_datasets(config.data) if any(_ends(plan, rank)) else None
    lengths = [(len(datasets.train), len(datasets.validation or ())) if datasets is not None else (0, 0)]
    if plan.topology.world_size > 1:
        torch.distributed.broadcast_object_list(lengths, 0)
    return datasets, lengths[0]


def _loaders(
    config: RunConfig, plan: RunPlan, rank: int, datasets: Datasets | None, lengths: tuple[int, int]
) -> tuple[Any, Any | None]:
    first, last = _ends(plan, rank)
    common: dict[str, Any] = {
        "batch_size": config.data.batch_size,
        "data": plan.layout["data"],
        "replica": plan.topology.coordinates(rank).data,
        "inputs": first,
        "targets": last,
        "seed": config.seed,
        "workers": config.data.workers,
    }
    train = make_loader(datasets.train if datasets else None, lengths[0], shuffle=config.data.shuffle, **common)
    if not lengths[1]:
        return train, None
    return train, make_loader(datasets.validation if datasets else None, lengths[1], shuffle=False, **common)


def _predict(
    strategy: PipelineStrategy, config: RunConfig, profile: ModelProfile, run_dir: Path, batch: Any
) -> RunPlan:
    """The measured plan; rank 0 puts its figures into the record before the first step."""
    start = time.perf_counter()
    plan = measured_plan(strategy, config, profile, strategy.batch_to_device(batch))
    if strategy.global_rank == 0:
        record = RunRecord.load(run_dir)
        record.replace(
            step_seconds=record.step_seconds | {"predicted": plan.time.step_seconds},
            bubble_ratio=record.bubble_ratio | {"predicted": plan.time.bubble_ratio},
            extras=record.extras | {"seconds_source": plan.time.source},
        ).save(run_dir)
        logger.info(
            "predicted: %.4f s per step, bubble %.3f (rehearsed in %.1f s)",
            plan.time.step_seconds,
            plan.time.bubble_ratio,
            time.perf_counter() - start,
        )
    return plan


def _trainer(
    config: RunConfig, run_dir: Path, strategy: PipelineStrategy, callbacks: list[Callback], *, has_validation: bool
) -> pl.Trainer:
    world_size = strategy.plan.topology.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return pl.Trainer(
        accelerator="cuda" if strategy.root_device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=world_size // local,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if world_size > 1 else None,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=min(config.trainer.val_every or config.trainer.max_steps, config.trainer.max_steps),
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if has_validation else 0,
        num_sanity_val_steps=0,
        logger=build_logger(config, run_dir, strategy.global_rank if world_size > 1 else 0),
        profiler=build_profiler(config, run_dir),
        log_every_n_steps=config.trainer.log_every,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(run_dir),
        inference_mode=False,
    )
