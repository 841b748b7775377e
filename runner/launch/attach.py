"""Runs a rank that torchrun, srun or mpirun has started.

No process is launched here. The ranks agree on one run directory, and on whether the request may start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from runner.config.schema import RunConfig
from runner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    DoesNotFitError,
    Problem,
    RequestError,
    RunFailedError,
    RunnerError,
    raise_problems,
)
from runner.launch.failure import RankFailure, is_interrupt, status_of, tell_torchrun
from runner.launch.local.ranks import stopped_reason
from runner.launch.processes.meeting import way_out
from runner.launch.rank import load_entry, open_store, prepare_process, process_group, report_failure
from runner.launch.run.common_place import leave_mark, sees_mark
from runner.launch.run.directory import OUTPUTS
from runner.launch.run.going_on import short_path
from runner.launch.run.lock import Incarnation, InUseError, alone_in, take_directory
from runner.launch.run.machines import MachineFacts, smallest_machine
from runner.launch.run.memory_advice import advise
from runner.launch.run.prepare import compile_operators, prepare, tell_plan, write_request
from runner.launch.run.restart import failures_before, go_on, has_begun
from runner.launch.run.same_stages import with_stages_before
from runner.launch.run.show import show
from runner.record import RunRecord, Status, finish_failed
from runner.training.stop_signals import StopSignals

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["QueuedStep", "attach", "grace_problems", "run_attached", "world_size_problems"]

logger = logging.getLogger(__name__)

_VERDICT = "runner/verdict"
_MARK = "runner/mark"
_BLIND = "runner/blind"
_LOOKED = "runner/looked"
_READY = "runner/ready"  # the rank's machine has what the run needs
_HANDED_OVER = "runner/handed_over"
_SEEING_SECONDS = 60.0  # a machine may remember for a while that a file of another one was not there
_PREPARING = timedelta(hours=1)  # rank 0 may have to measure a model's layers first
_HANDING_OVER = timedelta(minutes=2)


class QueuedStep(Protocol):
    """A step of a cluster's job, which can be put into the queue again."""

    @property
    def place(self) -> str:
        """A name for the step that stays the same when the job is queued again."""

    @property
    def restarts(self) -> int:
        """How often the job has been queued again."""

    def queue_again(self) -> bool:
        """Put the job back into the queue, the last action of a rank; return whether that was done."""


def attach(config: RunConfig, *, command: str, entry: str) -> int:
    """Run this process as one of the ranks that torchrun or mpirun started.

    Rank 0 checks the request and makes the run directory. The other ranks read the result from the store before the
    first collective operation.

    Returns:
        the exit status of this process.

    Raises:
        RequestError, DoesNotFitError: the plan has problems, or does not fit; raised on every rank, so that the user
            sees the reason whichever rank ends first.
    """
    raise_problems([*world_size_problems(config, int(os.environ["WORLD_SIZE"])), *grace_problems(config)])
    signals = StopSignals.listen()

    def end(number: int, frame: FrameType | None) -> None:
        """The launcher ends the other ranks with SIGTERM; one after a request to stop changes nothing."""
        if signals.received is None:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    return run_attached(config, None, command=command, entry=entry, signals=signals)


def run_attached(
    config: RunConfig,
    step: QueuedStep | None,
    *,
    command: str,
    entry: str,
    place_is_made: bool = False,
    signals: StopSignals | None = None,
) -> int:
    """Run this process as one of the ranks, which knows its number, and can reach the others.

    Args:
        step: what started the ranks, if that can start them again.
        place_is_made: whether the process that submitted the job has already made the run directory.
        signals: the signals that ask for a checkpoint at the end of a step.
    """
    rank = int(os.environ["RANK"])
    prepare_process(config)
    store = open_store(config)
    with contextlib.ExitStack() as held:
        machine = smallest_machine(config, store, rank, int(os.environ["WORLD_SIZE"]), _PREPARING)
        begin = _Beginning(config, step, command, place_is_made, held, machine)
        run_dir, resume = _agreed_place(begin, store, rank)
        _meet(store, rank, run_dir)
        return _run_in(run_dir, replace(config, resume=resume), step, store, entry=entry, signals=signals)


def _run_in(
    run_dir: Path,
    config: RunConfig,
    step: QueuedStep | None,
    store: Store | None,
    *,
    entry: str,
    signals: StopSignals | None,
) -> int:
    rank = int(os.environ["RANK"])
    config = replace(config, run_dir=str(run_dir))
    if rank > 0:
        compile_operators(config)  # rank 0 has compiled them on its machine already
    _wait_for_all(store, rank, _READY)
    failure: RankFailure | None = None
    try:
        with process_group(config, store):
            stopped = load_entry(entry)(config, run_dir)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if is_interrupt(error):
            _finish(run_dir, "interrupted", "stopped by a signal")
            return EXIT_INTERRUPTED
        failure = report_failure(error, run_dir, rank)
        tell_torchrun(error)
    if failure is not None:  # the exception is released here, and with it the tensors that its frames held
        return _account(failure, config, run_dir, rank, step)
    if not stopped:
        if rank == 0 and not config.launcher.wait:  # else the command that waits for the job does
            _show_end(run_dir)
        return EXIT_OK
    if rank == 0:
        _hand_over(config, run_dir, step, signals)
    _leave_together(store, rank)
    return EXIT_PREEMPTED


def _show_end(run_dir: Path) -> None:
    record = RunRecord.load(run_dir)
    if record.status == "ok":
        show(record, short_path(run_dir))


def _account(failure: RankFailure, config: RunConfig, run_dir: Path, rank: int, step: QueuedStep | None) -> int:
    """Report a failure, queue the job again where that is allowed, and return the exit status of this rank."""
    message = f"rank {rank} failed: {failure.summary()}"
    logger.error("%s", message)
    status = status_of(failure.exit_status)
    try:
        is_first = _finish(run_dir, status, message)
    except OSError as error:  # the cause has been reported all the same
        logger.error("the record could not be written: %s", error)
        return failure.exit_status
    if status == "out_of_memory" and is_first:
        advise(config, run_dir)
    may_restart = failures_before(RunRecord.load(run_dir)) < config.launcher.max_restarts
    if step is not None and failure.exit_status == EXIT_FAILED and may_restart:
        step.queue_again()
    return failure.exit_status


def world_size_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Problems if the number of ranks that were started is not the product of the parallelism degrees."""
    degrees = config.parallelism
    wanted = degrees.pipeline * degrees.data * degrees.tensor
    if wanted == world_size:
        return []
    rule = f"the product of the degrees, {wanted}, must be the number of ranks, {world_size}"
    model_degree = degrees.pipeline * degrees.tensor
    fix = f"parallelism.data={world_size // model_degree}" if world_size % model_degree == 0 else ""
    shown = f"{degrees.pipeline} x {degrees.data} x {degrees.tensor}"
    fix = ", or ".join(each for each in (fix, way_out()) if each)
    return [Problem("parallelism", shown, rule, f"WORLD_SIZE is {world_size}", fix)]


def grace_problems(config: RunConfig) -> list[Problem]:
    """A problem if the request says how long ranks may take to stop, which is not for this process to decide."""
    if config.launcher.grace_seconds is None:
        return []
    path, why = "launcher.grace_seconds", "Who has started the ranks also ends them"
    rule = "must be null where another launcher starts the ranks"
    return [Problem(path, config.launcher.grace_seconds, rule, why, f"{path}=null")]


class _Beginning:
    """What rank 0 does before the other ranks may start: it checks the request and makes or finds the run directory.

    Rank 0 holds the directory until ``held`` is closed, and plans for the smallest ``machine`` of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        step: QueuedStep | None,
        command: str,
        place_is_made: bool,
        held: contextlib.ExitStack,
        machine: MachineFacts,
    ) -> None:
        self.config = config
        self.step = step
        self.command = command
        self.place_is_made = place_is_made
        self.held = held
        self.machine = machine
        if config.run_dir is None and step is not None:  # the same after a requeue
            self.config = replace(config, run_dir=str((OUTPUTS / config.name / f"job_{step.place}").absolute()))

    def __call__(self) -> RunConfig:
        """Return the request as it starts: ``run_dir`` exists, and ``resume`` is a file or None."""
        config, again = self.config, self.step is not None and self.step.restarts > 0
        incarnation = Incarnation(f"slurm {self.step.place}", self.step.restarts) if self.step is not None else None
        if again and config.run_dir is not None and has_begun(Path(config.run_dir)):
            self.held.enter_context(alone_in(Path(config.run_dir), self.command, incarnation))
            return go_on(config, Path(config.run_dir), command=self.command)[0]
        plan = prepare(config, place_is_made=self.place_is_made, machine=self.machine)
        config = take_directory(config, self.command, self.held, incarnation)
        plan = with_stages_before(config, plan, self.machine)
        tell_plan(plan)
        write_request(config, plan, Path(str(config.run_dir)), command=self.command)
        return config


def _agreed_place(begin: _Beginning, store: Store | None, rank: int) -> tuple[Path, str | None]:
    """Return the run directory and the checkpoint to resume from, as rank 0 has decided them for all ranks."""
    if rank == 0:
        try:
            config = begin()
        except BaseException as error:
            _tell(store, _refusal(error))
            raise
        _tell(store, {"run_dir": config.run_dir, "resume": config.resume})
        return Path(str(config.run_dir)), config.resume
    assert store is not None  # a rank above 0 is not alone, so there is a store
    store.wait([_VERDICT], _PREPARING)
    verdict = json.loads(store.get(_VERDICT))
    if "run_dir" in verdict:
        return Path(verdict["run_dir"]), verdict["resume"]
    if "problems" in verdict:
        kind_of_problems = InUseError if verdict["in_use"] else RequestError
        raise kind_of_problems([Problem(**problem) for problem in verdict["problems"]])
    kind = DoesNotFitError if verdict["exit_status"] == DoesNotFitError.exit_status else RunFailedError
    raise kind(verdict["message"])


def _meet(store: Store | None, rank: int, run_dir: Path) -> None:
    """Wait until all ranks see the file that rank 0 leaves in the run directory.

    Raises:
        RequestError: a rank does not see it; raised on every rank.
    """
    if store is None:
        return
    if rank == 0:
        store.set(_MARK, leave_mark(run_dir))
    store.wait([_MARK], _PREPARING)
    mark = store.get(_MARK).decode()
    if rank > 0 and not sees_mark(run_dir, mark, _SEEING_SECONDS):
        store.set(_BLIND, f"rank {rank} on {socket.gethostname()}")
    _wait_for_all(store, rank, _LOOKED)
    if rank == 0:
        (run_dir / mark).unlink(missing_ok=True)
    if store.check([_BLIND]):
        why = f"{store.get(_BLIND).decode()} does not see what rank 0 has written there"
        fix = "run_dir=DIRECTORY with one on a file system that they share"
        problem = Problem("run_dir", str(run_dir), "must be a directory that all machines of the run see", why, fix)
        if rank == 0:
            _finish(run_dir, "failed", problem.line())
        raise RequestError([problem])


def _wait_for_all(store: Store | None, rank: int, event: str) -> None:
    """Wait until every rank has come so far; the time-out of collective operations is too short."""
    if store is not None:
        store.set(f"{event}/{rank}", "")
        store.wait([f"{event}/{one}" for one in range(int(os.environ["WORLD_SIZE"]))], _PREPARING)


def _tell(store: Store | None, verdict: dict[str, Any]) -> None:
    if store is not None:
        store.set(_VERDICT, json.dumps(verdict, default=str))


def _refusal(error: BaseException) -> dict[str, Any]:
    """What the other ranks are told, so that they end as rank 0 does."""
    if isinstance(error, RequestError):
        problems = [asdict(problem) for problem in error.problems]
        return {"problems": problems, "in_use": isinstance(error, InUseError)}
    if isinstance(error, RunnerError):
        return {"message": str(error), "exit_status": error.exit_status}
    return {"problems": [asdict(_broken(error))], "in_use": False}


def _broken(error: BaseException) -> Problem:
    return Problem("request", "", "could not be planned", f"rank 0: {type(error).__name__}: {error}")


def _finish(run_dir: Path, status: Status, reason: str) -> bool:
    """Record why the run ended and return True, unless another rank has done so before.

    The first rank to report is nearest to the cause, so later ranks leave its report unchanged.
    """
    if RunRecord.load(run_dir).status != "running":
        return False
    finish_failed(run_dir, status, reason)
    return True


def _hand_over(config: RunConfig, run_dir: Path, step: QueuedStep | None, signals: StopSignals | None) -> None:
    """Record that the run was preempted and queue the job again.

    All data must have been saved. Only the exit may follow, because SLURM ends the processes of a job that it queues
    again.
    """
    record = RunRecord.load(run_dir)
    reason = stopped_reason(signals.received if signals is not None else None, record.steps)
    record.replace(status="preempted", reason=reason).save(run_dir)
    logger.info("%s", reason)
    if step is not None and config.launcher.requeue:
        step.queue_again()


def _leave_together(store: Store | None, rank: int) -> None:
    """Keep every rank alive until rank 0 has handed over, because srun ends all ranks when the first one ends."""
    if store is None:
        return
    if rank == 0:
        store.set(_HANDED_OVER, "")
        return
    with contextlib.suppress(RuntimeError):  # rank 0 has left already, and the store with it
        store.wait([_HANDED_OVER], _HANDING_OVER)
