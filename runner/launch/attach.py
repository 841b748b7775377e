"""A rank that torchrun has started: nothing to launch, one place and one verdict to agree on."""

from __future__ import annotations

import json
import logging
import os
import signal
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunConfig
from runner.errors import EXIT_INTERRUPTED, DoesNotFitError, Problem, RequestError, raise_problems
from runner.launch.failure import status_of
from runner.launch.prepare import compile_operators, prepare, write_request
from runner.launch.rank import load_entry, open_store, prepare_process, process_group, report_failure
from runner.launch.resume import with_checkpoint
from runner.launch.run_directory import create_run_directory
from runner.record import RunRecord, Status, finish_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["attach", "world_size_problems"]

logger = logging.getLogger(__name__)

_VERDICT = "runner/verdict"
_READY = "runner/ready"
_PREPARING = timedelta(hours=1)  # rank 0 may have to measure a model's layers first


def attach(config: RunConfig, *, command: str, entry: str) -> int:
    """Be one rank of the run; returns this process's exit status.

    Rank 0 checks the request and makes the directory; the others learn its verdict through the store, before
    the first collective.

    Raises:
        RequestError, DoesNotFitError: on every rank, so that the reason is seen whichever ends first.
    """
    raise_problems(world_size_problems(config, int(os.environ["WORLD_SIZE"])))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun's way of ending the others
    rank = int(os.environ["RANK"])
    prepare_process(config)
    store = open_store(config)
    run_dir, resume = _agreed_place(config, store, rank, command)
    config = replace(config, run_dir=str(run_dir), resume=resume)
    if rank > 0:
        compile_operators(config)  # rank 0's machine has them
    _meet(store, rank)
    try:
        with process_group(config, store):
            load_entry(entry)(config, run_dir)
    except KeyboardInterrupt:
        _finish(run_dir, "interrupted", "stopped by a signal")
        return EXIT_INTERRUPTED
    except Exception as error:
        failure = report_failure(error, run_dir, rank)
        message = f"rank {rank} failed: {failure.summary()}"
        logger.error("%s", message)
        _finish(run_dir, status_of(failure.exit_status), message)
        return failure.exit_status
    return 0


def world_size_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Whether as many ranks were started as the request's degrees ask for."""
    degrees = config.parallelism
    wanted = degrees.pipeline * degrees.data * degrees.tensor
    if wanted == world_size:
        return []
    rule = f"the product of the degrees, {wanted}, must be the number of ranks, {world_size}"
    model_degree = degrees.pipeline * degrees.tensor
    fix = f"parallelism.data={world_size // model_degree}" if world_size % model_degree == 0 else ""
    shown = f"{degrees.pipeline} x {degrees.data} x {degrees.tensor}"
    return [Problem("parallelism", shown, rule, f"WORLD_SIZE is {world_size}", fix)]


def _agreed_place(config: RunConfig, store: Store | None, rank: int, command: str) -> tuple[Path, str | None]:
    """The run's directory, and the checkpoint that it continues from."""
    if rank == 0:
        try:
            plan = prepare(config)
            config = with_checkpoint(config)
            run_dir = create_run_directory(config.name, config.run_dir)
            write_request(replace(config, run_dir=str(run_dir)), plan, run_dir, command=command)
        except (RequestError, DoesNotFitError) as error:
            _tell(store, _refusal(error))
            raise
        except BaseException as error:
            _tell(store, {"does_not_fit": None, "problems": [asdict(_broken(error))]})
            raise
        _tell(store, {"run_dir": str(run_dir), "resume": config.resume})
        return run_dir, config.resume
    assert store is not None  # rank 1 and up have peers
    store.wait([_VERDICT], _PREPARING)
    verdict = json.loads(store.get(_VERDICT))
    if "run_dir" in verdict:
        return Path(verdict["run_dir"]), verdict["resume"]
    if verdict["does_not_fit"] is not None:
        raise DoesNotFitError(verdict["does_not_fit"])
    raise RequestError([Problem(**problem) for problem in verdict["problems"]])


def _meet(store: Store | None, rank: int) -> None:
    """Wait until every rank's machine has what the run needs; the collectives' own patience is shorter."""
    if store is not None:
        store.set(f"{_READY}/{rank}", "")
        store.wait([f"{_READY}/{one}" for one in range(int(os.environ["WORLD_SIZE"]))], _PREPARING)


def _tell(store: Store | None, verdict: dict[str, Any]) -> None:
    if store is not None:
        store.set(_VERDICT, json.dumps(verdict, default=str))


def _refusal(error: RequestError | DoesNotFitError) -> dict[str, Any]:
    if isinstance(error, DoesNotFitError):
        return {"does_not_fit": str(error), "problems": []}
    return {"does_not_fit": None, "problems": [asdict(problem) for problem in error.problems]}


def _broken(error: BaseException) -> Problem:
    return Problem("request", "", "could not be planned", f"rank 0: {type(error).__name__}: {error}")


def _finish(run_dir: Path, status: Status, reason: str) -> None:
    """The first rank to speak is nearest to the cause; the others leave its word alone."""
    if RunRecord.load(run_dir).status == "running":
        finish_failed(run_dir, status, reason)
