"""Runs one rank of a training run, from its configuration to its part of the record."""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from runner.checkpoint.file import CheckpointError, admitted
from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.errors import Problem, RequestError, raise_problems
from runner.model.own_methods import brings
from runner.model.seeds import seed_process
from runner.plan.values import RunPlan
from runner.reads import deaf
from runner.record import REHEARSED_COMPUTE, RunRecord, StepLog
from runner.strategy.pipeline import EngineStrategy
from runner.training.averaging import WeightAveraging
from runner.training.callbacks import (
    BeforeFirstStep,
    MissedValidation,
    StepClock,
    Validations,
)
from runner.training.checkpoints import Checkpoints, SaveFirst
from runner.training.data.loading import (
    close_loader,
    few_samples_note,
    first_batch,
    no_validation_note,
    resume_at,
    samples_of_step,
    samples_per_epoch,
    steps_per_epoch,
    timed_first_batch,
)
from runner.training.data.timed import TimedLoader
from runner.training.finish import Times, finish
from runner.training.lightning_module import TrainedModule
from runner.training.loggers import build_loggers, build_profiler, note_identity
from runner.training.measure.loop import usual_loop_seconds
from runner.training.measure.prediction import measured_plan
from runner.training.measure.shared import SharedFigures, store_of_ranks
from runner.training.measure.spent import REHEARSAL, STEPS, Spent
from runner.training.migrations import Migrations
from runner.training.module import LayersModule
from runner.training.progress import progress
from runner.training.random_state import random_state
from runner.training.rank_parts import RankParts, load_parts
from runner.training.resume import History, Progress, other_data_problems, read_progress
from runner.training.stop_signals import StopSignals
from runner.training.trainer import make_trainer
from runner.training.try_loss import try_loss_on_ranks
from runner.training.users_callbacks import EndTogether, build_callbacks, monitor_problems
from runner.training.watchdog import Watchdog

__all__ = ["run_rank", "set_up_logging"]

logger = logging.getLogger(__name__)


def run_rank(config: RunConfig, run_dir: Path, *, watchers: Sequence[Callback] = (), validate: bool = True) -> bool:
    """Train as this process's rank. Every rank calls it, with torch.distributed initialised if there are several.

    Rank 0 writes the prediction into ``record.json`` before the first step, a line per step into ``steps.jsonl``, and
    the complete record at the end.

    Args:
        config: the request; its ``resume`` is None or the checkpoint to continue from.
        run_dir: holds the layer profile and the first record.
        watchers: further callbacks.
        validate: whether validation data is used, if there is any.

    Returns:
        whether a signal stopped the run before its last step; the same on every rank.

    Raises:
        RequestError: the user's model, data or loss does not meet its contract or does not match the checkpoint.
        RunFailedError: a step failed.
    """
    with admitted(config.checkpoint.allow_pickle), deaf():
        return _train(config, run_dir, watchers, validate=validate)


def _train(config: RunConfig, run_dir: Path, watchers: Sequence[Callback], *, validate: bool) -> bool:
    rank, spent = int(os.environ.get("RANK", "0")), Spent()
    set_up_logging(rank)
    seed_process(config.seed)
    parts = load_parts(config, run_dir, rank, validate=validate)
    config, strategy, module, loaders = parts.config, parts.strategy, parts.module, parts.loaders
    if rank == 0:
        _tell_of_data(config, loaders)
    resumed = _resumed(config, loaders[0])
    if resumed is not None:
        strategy.plan = parts.plan.at(resumed.step)
    before = resumed.history if resumed is not None else History()
    _show_history(module, before)
    log = StepLog(run_dir, resumed.step if resumed is not None else 0) if rank == 0 else None
    figures = SharedFigures(parts.plan, rank, store_of_ranks())
    samples_of = partial(samples_of_step, loaders[0], config.data.batch_size)
    clock = StepClock(log, samples_of, before, figures, _loading_of(loaders[0]))
    checkpoints = _checkpoints(config, run_dir, strategy, module, loaders, clock, resumed, spent)
    plans = [parts.plan]

    def predict(trainer: pl.Trainer) -> None:
        assert strategy.engine is not None
        spent.enter(REHEARSAL)
        first, awaited = timed_first_batch(loaders[0])
        with strategy.engine.unchanged() as kept, kept.first_run():
            if config.metrics and loaders[1] is not None:
                module.check_metrics(strategy.batch_to_device(first_batch(loaders[1])))
            try_loss_on_ranks(strategy, parts.loss, config, parts.profile, strategy.batch_to_device(first))
        plans.append(_predict(strategy, config, run_dir, first, parts.plan, awaited))
        heard = StopSignals.current()
        if heard is not None and strategy.engine is not None:
            heard.pass_on(strategy.engine.request_stop)
        if rank == 0:
            note_identity(trainer.loggers, run_dir)
        spent.enter(STEPS)
        clock.start()

    users, end = build_callbacks(config), EndTogether(clock.callbacks_ended)
    if isinstance(module, LayersModule):
        raise_problems(monitor_problems(config, users, validates=loaders[1] is not None))
    average = WeightAveraging(config.trainer.ema_decay) if config.trainer.ema_decay is not None else None
    are_due = _validations(config, loaders[1])
    missing_after = resumed.missed_validation(are_due) if resumed is not None else None
    callbacks: list[Callback] = [
        *([average] if average is not None else []),
        BeforeFirstStep(predict),
        spent,
        clock,
        *([Migrations(parts.plan, clock)] if parts.plan.cuts else []),
        Validations(are_due, missing_after),
        SaveFirst(checkpoints),
        *users,
        checkpoints,
        *progress(config, parts.plan, clock, rank),
        _watchdog(config, run_dir, rank, parts.plan),
        MissedValidation(missing_after),
        *watchers,
        end,
    ]
    trainer = _trainer(parts, run_dir, callbacks, rank=rank, steps_before=len(before.loss))
    failed: Exception | None = None
    try:
        trainer.fit(module, *loaders, ckpt_path=config.resume)
    except Exception as error:
        if not checkpoints.is_over:
            raise
        failed = error  # of a hook at the end: all steps are taken, and their weights are written first
    finally:
        for loader in loaders:
            close_loader(loader)
        if log is not None:
            log.close()  # on_train_end is not called if the run fails or has no step left to take
    stopped = _was_stopped(trainer, strategy, end, config.trainer.max_steps)
    times = Times(clock, spent)
    finish(trainer, module, config, run_dir, plans[-1], times, checkpoints, average, stopped=stopped, failed=failed)
    return stopped


def _show_history(module: TrainedModule, before: History) -> None:
    """Let a module go on with the validations of the run that is continued."""
    module.val_losses = [list(pair) for pair in before.val_loss]
    module.val_metrics = {name: [list(pair) for pair in pairs] for name, pairs in before.metrics.items()}


def _was_stopped(trainer: pl.Trainer, strategy: EngineStrategy, end: EndTogether, max_steps: int) -> bool:
    """Whether a signal, and no callback, has ended the run before its last step; all ranks must ask."""
    if trainer.global_step >= max_steps:
        return False
    if end.ended(strategy):
        logger.info("a callback has ended the run after step %d of %d", trainer.global_step, trainer.max_steps)
        return False
    return strategy.stopped


def _loading_of(loader: DataLoader[Any]) -> Callable[[], float]:
    """A function that returns the seconds for which the loader's batches were waited for, since its last call."""
    return loader.take_seconds if isinstance(loader, TimedLoader) else lambda: 0.0


def _watchdog(config: RunConfig, run_dir: Path, rank: int, plan: RunPlan) -> Watchdog:
    launcher = config.launcher
    end_seconds = launcher.step_timeout_seconds if launcher.watchdog_seconds is not None else math.inf
    report_seconds = launcher.watchdog_seconds or math.inf
    return Watchdog(run_dir, rank, plan.topology.world_size, report_seconds, end_seconds)


def _resumed(config: RunConfig, loader: DataLoader[Any]) -> Progress | None:
    """The progress from which the run continues; the loader is moved to that place.

    Raises:
        RequestError: the file is damaged, or the data has another length.
    """
    if config.resume is None:
        return None
    try:
        found, _ = read_progress(Path(config.resume))
    except CheckpointError as error:
        raise RequestError([Problem("resume", config.resume, "must be a good checkpoint", str(error))]) from error
    raise_problems(other_data_problems(config, found, steps_per_epoch(loader), samples_per_epoch(loader)))
    if config.trainer.max_epochs is not None and config.trainer.max_steps < found.step:
        rule = "must reach the checkpoint's step"
        why = f"It is {found.step}, and they end at {config.trainer.max_steps}"
        raise RequestError([Problem("trainer.max_epochs", config.trainer.max_epochs, rule, why)])
    if why := resume_at(loader, found.epoch, found.batch_in_epoch, found.place):
        logger.info("%s is read again up to its place in the checkpoint: %s", config.data.target, why)
    return found


def _checkpoints(
    config: RunConfig,
    run_dir: Path,
    strategy: EngineStrategy,
    module: TrainedModule,
    loaders: tuple[Any, Any | None],
    clock: StepClock,
    resumed: Progress | None,
    spent: Spent,
) -> Checkpoints:
    def progress_of(trainer: pl.Trainer) -> Progress:
        clock.settle(strategy)
        clock.write_row(trainer)
        return Progress.of(
            trainer,
            config,
            batches_per_epoch=steps_per_epoch(loaders[0]),
            samples=samples_per_epoch(loaders[0]),
            history=clock.history(module),
            random=dict(strategy.saved_parts((strategy.global_rank, random_state())) or ()),
            place_after=loaders[0].place_after,
        )

    return Checkpoints(
        run_dir / "checkpoints",
        config.checkpoint,
        validates=_validations(config, loaders[1]),
        progress=progress_of,
        resumed=resumed,
        follows_config=not brings(module, "configure_optimizers") or isinstance(module, LayersModule),
        saved=clock.start,
        spent=spent,
        val_losses=lambda: module.val_losses,
        target=config.model.target,
    )


def _tell_of_data(config: RunConfig, loaders: tuple[Any, Any | None]) -> None:
    """Log in what the sets differ from what the request asks for."""
    for note in (few_samples_note(loaders[0], config.data.batch_size), no_validation_note(loaders[1], config)):
        if note is not None:
            logger.warning("%s", note)


def _validations(config: RunConfig, loader: DataLoader[Any] | None) -> Callable[[int], bool]:
    """A function that tells whether a validation follows a step."""
    interval, last = _validation_interval(config), config.trainer.max_steps
    return lambda step: loader is not None and (step % interval == 0 or step == last)


def _validation_interval(config: RunConfig) -> int:
    """Number of steps between validations."""
    return min(config.trainer.val_every or config.trainer.max_steps, config.trainer.max_steps)


class _Lines(logging.StreamHandler[Any]):
    """Writes log lines to standard error.

    Torch's handler of SIGCHLD raises in the main thread, wherever it is, when a loader worker has died. If this is
    within a log call, logging would print the error and go on.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not isinstance(sys.exc_info()[1], OSError):  # a terminal that is gone ends no run
            raise


def set_up_logging(rank: int) -> None:
    """Let rank 0 log, and hide Lightning's advice for people who configure it by hand."""
    if not logging.getLogger().handlers:
        level = logging.INFO if rank == 0 else logging.WARNING
        logging.basicConfig(level=level, format="%(message)s", handlers=[_Lines()])
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*(does not have many workers|isinstance\(treespec).*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _predict(
    strategy: EngineStrategy, config: RunConfig, run_dir: Path, batch: Any, planned: RunPlan, awaited: float
) -> RunPlan:
    """The measured plan; rank 0 writes its figures into the record before the first step.

    Args:
        awaited: seconds for which a step waits for its batch.
    """
    start = time.perf_counter()
    besides = awaited + usual_loop_seconds(config)
    plan = measured_plan(strategy, config, strategy.batch_to_device(batch), besides)
    if strategy.global_rank == 0:
        record = RunRecord.load(run_dir)
        record.replace(
            config=record.config | {"trainer": asdict(config.trainer)},  # with the steps that its epochs are
            step_seconds=record.step_seconds | {"predicted": plan.time.step_seconds},
            bubble_ratio=record.bubble_ratio | {"predicted": plan.time.bubble_ratio},
            extras=record.extras
            | {
                "seconds_source": plan.time.source,
                REHEARSED_COMPUTE: statistics.fmean(plan.time.busy_seconds),
                "parameters": plan.profile.num_parameters,
                "trained_parameters": plan.profile.num_trained,
            },
        ).save(run_dir)
        bubble = f", bubble {plan.time.bubble_ratio:.1%}" if plan.has_bubble else ""
        seconds, rehearsed = format_seconds(plan.time.step_seconds), format_seconds(time.perf_counter() - start)
        alone = format_seconds(planned.time.step_seconds)  # from layers that were measured one by one, or before
        logger.info("predicted: %s per step%s (rehearsed in %s; the plan: %s)", seconds, bubble, rehearsed, alone)
    return plan


def _trainer(parts: RankParts, run_dir: Path, callbacks: list[Callback], *, rank: int, steps_before: int) -> pl.Trainer:
    config, strategy = parts.config, parts.strategy
    world_size = strategy.plan.topology.world_size
    return make_trainer(
        strategy,
        callbacks,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=_validation_interval(config),
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if parts.loaders[1] is not None else 0,
        num_sanity_val_steps=0,
        # Not the strategy's rank, which is 0 everywhere until a trainer has the strategy.
        logger=build_loggers(config, run_dir, rank if world_size > 1 else 0, steps_before),
        profiler=build_profiler(config, run_dir),
        log_every_n_steps=config.trainer.log_every,
        default_root_dir=str(run_dir),
    )
