"""Runs one training run, from its request to its exit status."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED
from runner.launch.failure import unwritable
from runner.launch.local.forked import Spare
from runner.launch.local.ranks import Launch, Outcome, import_ahead, run_ranks, stopped_early
from runner.launch.mpi import become_rank, complete_rank, num_ranks
from runner.launch.processes.leaving import leave
from runner.launch.processes.stops import end_undisturbed, signal_of
from runner.launch.rank import TORCHRUN_VARIABLE, TRAIN_ENTRY
from runner.launch.run.going_on import command_that_continues, short_path
from runner.launch.run.lock import take_directory
from runner.launch.run.memory_advice import advise
from runner.launch.run.other_work import OtherWork
from runner.launch.run.prepare import place_of, prepare, tell_plan, write_request
from runner.launch.run.restart import go_on
from runner.launch.run.same_stages import with_stages_before
from runner.launch.run.show import show
from runner.launch.slurm.step import current_step
from runner.record import OTHER_WORK, RUN_SECONDS, RunRecord, finish_failed

if TYPE_CHECKING:
    from rich.console import Console

    from runner.launch.local.forked import Template
    from runner.plan.values import RunPlan

__all__ = ["run_in", "train"]

logger = logging.getLogger(__name__)


class _Begun(NamedTuple):
    """When the command began, and when it began to start ranks; in seconds of ``time.perf_counter``."""

    command: float
    ranks: float


def train(
    config: RunConfig,
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
    begun: float | None = None,
) -> int:
    """Check, start, watch and record one run; return the command's exit status.

    Under torchrun, as one of several tasks of srun or mpirun, and where torch's variables say so, this process is a
    rank itself: it starts no others, and the process ends in this call.

    Args:
        config: the resolved request.
        command: what the user typed, for the record.
        entry: ``module:function`` that every rank calls with the configuration and the run's directory.
        console: where the table of predictions and measurements is shown; default standard output.
        begun: when the command began, as ``time.perf_counter`` counts; default: now.

    Raises:
        RequestError, DoesNotFitError: before anything is written or started.
        KeyboardInterrupt: a signal came before the run had a directory.
    """
    begun = time.perf_counter() if begun is None else begun
    if num_ranks() > 1:
        become_rank(os.environ)
    step = current_step()
    if step is not None and step.num_tasks < 2:
        step = None  # the job's script, which starts its ranks
    local = step is None and config.launcher.name != "slurm"
    if TORCHRUN_VARIABLE in os.environ or num_ranks() > 1 or (local and complete_rank(os.environ)):
        from runner.launch.attach import attach

        leave(attach(config, command=command, entry=entry))
    if step is not None:
        from runner.launch.slurm.job import attach_step

        leave(attach_step(config, step, command=command, entry=entry))
    if config.launcher.name == "slurm":
        return _submit(config, command=command, entry=entry)
    with import_ahead(config, entry) as template, contextlib.ExitStack() as held:
        plan = prepare(config)
        config = take_directory(config, command, held)
        plan = with_stages_before(config, plan)
        tell_plan(plan)
        run_dir = Path(str(config.run_dir))
        status = run_in(
            *(run_dir, config, plan), command=command, entry=entry, console=console, template=template, begun=begun
        )
    if status in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        logger.error("to continue: %s", command_that_continues(command, run_dir))
    return status


def _submit(config: RunConfig, *, command: str, entry: str) -> int:
    from runner.launch.slurm.submit import print_script, submit

    if config.launcher.dry_run:
        return print_script(config, entry=entry)
    return submit(config, command=command, entry=entry)


def run_in(
    run_dir: Path,
    config: RunConfig,
    plan: RunPlan,
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
    template: Template | None = None,
    begun: float | None = None,
) -> int:
    """Run a checked request in a directory that exists; otherwise like :func:`train`.

    Args:
        begun: when the command began, as ``time.perf_counter`` counts; default: now.
        template: see :func:`runner.launch.local.ranks.run_ranks`.
    """
    now = time.perf_counter()
    times, others = _Begun(begun if begun is not None else now, now), OtherWork()
    config = replace(config, run_dir=str(run_dir))
    try:
        outcome = _run_with_restarts(run_dir, config, plan, template, command=command, entry=entry)
        end_undisturbed()
    except KeyboardInterrupt as error:  # just before or after the ranks ran; while they run, run_ranks handles signals
        end_undisturbed()
        outcome = stopped_early(run_dir, signal_of(error))
        if outcome.exit_status != EXIT_OK:
            with contextlib.suppress(OSError):  # the exit status says the same
                finish_failed(run_dir, outcome.status, outcome.reason or outcome.status)
    except OSError as error:  # a file of this process could not be written: the disk is full or missing
        return _without_space(run_dir, error)
    for line in outcome.consequences if outcome.status == "out_of_memory" else outcome.lines:
        logger.error("%s", line)
    if outcome.status == "out_of_memory":
        advise(config, run_dir)
        for line in replace(outcome, consequences=()).lines:
            logger.error("%s", line)
    if outcome.exit_status != EXIT_OK:
        return outcome.exit_status
    show(_completed(run_dir, times, others), short_path(run_dir), console)
    return EXIT_OK


def _completed(run_dir: Path, begun: _Begun, others: OtherWork) -> RunRecord:
    """The record with what this process alone knows: how long it planned, and took in all, and what else ran here."""
    record, now = RunRecord.load(run_dir), time.perf_counter()
    found, cores = record.extras.get(RUN_SECONDS), others.cores()
    if found is None:
        return record
    of_ranks = sum(value for part, value in found.items() if not part.startswith("num_"))
    seconds = {"planning": begun.ranks - begun.command, "start": max(0.0, now - begun.ranks - of_ranks), **found}
    known = {OTHER_WORK: {"cores": cores[0], "of": cores[1]}} if cores is not None else {}
    record = record.replace(extras=record.extras | {RUN_SECONDS: seconds} | known)
    with contextlib.suppress(OSError):  # the run is complete, and the screen says the same
        record.save(run_dir)
    return record


def _run_with_restarts(
    run_dir: Path, config: RunConfig, plan: RunPlan, template: Template | None, *, command: str, entry: str
) -> Outcome:
    """Run the ranks; after a failure, restart from the newest checkpoint, at most ``launcher.max_restarts`` times."""
    logger.info("run directory: %s", run_dir)
    config_file = write_request(config, plan, run_dir, command=command)
    launch = Launch(config_file, run_dir, plan.topology.world_size, config.trainer.threads, place_of(plan), entry=entry)
    restarts = config.launcher.max_restarts
    with Spare() as spare:
        outcome = run_ranks(launch, template, spare if restarts else None)
        for restart in range(restarts):
            if outcome.status != "failed":
                break
            for line in outcome.lines:
                logger.error("%s", line)
            logger.warning("restart %d of %d", restart + 1, restarts)
            go_on(config, run_dir, command=command)
            outcome = run_ranks(launch, spare.take(), spare if restart + 1 < restarts else None)
    return outcome


def _without_space(run_dir: Path, error: OSError) -> int:
    """Report that a file could not be written, also in the record if that is possible."""
    reason = unwritable(run_dir) or f"a file of the run could not be written: {error}"
    logger.error("%s", reason)
    with contextlib.suppress(OSError):
        finish_failed(run_dir, "failed", reason)
    return EXIT_FAILED
