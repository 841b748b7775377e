"""Submits the jobs of a sweep as one SLURM array, through submitit and with the settings of Hydra's launcher.

Each task of the array is a step whose tasks are the ranks of one job. They start as ranks under srun do, from the job's
resolved configuration. How a job ended is read from its record and from SLURM's state of the job, not from submitit:
without SLURM's accounting, submitit waits for ever for a task that was killed; it takes a failed node as final although
SLURM queues the job again; and it gives up at the first failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.launch.processes.leaving import leave
from runner.launch.slurm.ended import SETTLED, complete_record
from runner.launch.slurm.requeue import ENDED, job_state
from runner.launch.slurm.step import without_job
from runner.record import finish_failed, write_atomically

__all__ = ["ARRAY_FILE", "array_problems", "follow_jobs", "submit_array", "unfinished"]

logger = logging.getLogger(__name__)

ARRAY_FILE = "array.json"
"""A file in the sweep's directory: for each submitted job, its number in the sweep and its SLURM number."""

_OF_EXECUTOR = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")
_POLL_SECONDS = 0.5


def array_problems(settings: Mapping[str, Any], configs: Sequence[RunConfig]) -> list[Problem]:
    """Reasons why these jobs cannot run as one array."""
    if any(config.launcher.name != "local" for config in configs):
        why = "submitit starts the ranks"
        return [Problem("launcher", "slurm", "cannot be combined with hydra/launcher", why, "launcher=local")]
    if any(config.parallelism.name == "auto" for config in configs):
        why = "All tasks of an array have one shape, and the layouts that will be found may have several"
        fix = "`runner plan -m`, which prints their requests, or launcher=slurm, which submits each by itself"
        return [Problem("parallelism", "auto", "cannot be combined with hydra/launcher", why, fix)]
    ranks = {_ranks(config) for config in configs}
    if len(ranks) > 1:
        why = "All tasks of an array have one shape; sweep each number of ranks by itself"
        return [Problem("parallelism", sorted(ranks), "must ask for one number of ranks in all jobs", why)]
    nodes, count = int(settings["nodes"]), ranks.pop()
    if nodes < 1 or count % nodes:
        return [Problem("hydra.launcher.nodes", nodes, f"must divide the number of ranks, {count}")]
    gpus = settings["gpus_per_node"]
    if gpus and configs[0].device != "cpu" and count > nodes * int(gpus):
        why = f"Every rank has a GPU of its own: {count // nodes} ranks would be on each node"
        rule = f"must be at least {count // nodes}, or the nodes more"
        fix = f"hydra.launcher.gpus_per_node={count // nodes}"
        return [Problem("hydra.launcher.gpus_per_node", gpus, rule, why, fix)]
    tasks = int(settings["tasks_per_node"])
    if tasks not in (1, count // nodes):
        fix = f"hydra.launcher.tasks_per_node={count // nodes}"
        return [
            Problem("hydra.launcher.tasks_per_node", tasks, f"must be {count // nodes}", "It is left out, too", fix)
        ]
    return []


def submit_array(
    settings: Mapping[str, Any], jobs: Mapping[int, tuple[Path, RunConfig]], sweep_dir: Path, entry: str
) -> dict[int, str]:
    """Submit the jobs as one array; return their SLURM numbers and save them in :data:`ARRAY_FILE`.

    Args:
        settings: the settings of Hydra's launcher ``submitit_slurm``.
        jobs: number of each job to its directory, which holds what the ranks read, and its request.
        sweep_dir: holds submitit's own files, in ``.submitit``.
        entry: see :func:`runner.launch.start.train`.
    """
    import submitit

    config = next(iter(jobs.values()))[1]
    with without_job():
        executor = submitit.AutoExecutor(
            cluster="slurm", folder=sweep_dir / ".submitit" / "%j", slurm_max_num_timeout=settings["max_num_timeout"]
        )
        executor.update_parameters(**_parameters(settings, config))
        numbers = list(jobs)
        submitted = executor.map_array(_Task(entry), [str(jobs[number][0]) for number in numbers])
    found = {number: str(job.job_id) for number, job in zip(numbers, submitted, strict=True)}
    _write(sweep_dir, _read(sweep_dir) | found)
    logger.info("submitted as SLURM job %s: %d jobs", submitted[0].job_id.partition("_")[0], len(found))
    return found


def unfinished(sweep_dir: Path) -> dict[int, str]:
    """Jobs that an earlier start of the sweep submitted and that SLURM has not ended, by number."""
    found = {number: (job, job_state(job)) for number, job in _read(sweep_dir).items()}
    return {number: job for number, (job, state) in found.items() if state is not None and state not in ENDED}


def follow_jobs(jobs: Mapping[int, str], sweep_dir: Path) -> None:
    """Wait until SLURM has ended all jobs, and complete the records of those that could not. Ctrl-C cancels them."""
    ended = dict.fromkeys(jobs, 0)
    states: dict[int, str] = {}
    try:
        while open_jobs := [number for number, times in ended.items() if times < SETTLED]:
            for number in open_jobs:
                state = job_state(jobs[number]) or "unknown to SLURM"
                ended[number] = ended[number] + 1 if state in ENDED or state == "unknown to SLURM" else 0
                states[number] = state
                if ended[number] == SETTLED:
                    _account(sweep_dir / str(number), jobs[number], state)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        subprocess.run(["scancel", *jobs.values()], stdin=subprocess.DEVNULL, check=False)
        for number in (number for number, times in ended.items() if times < SETTLED):
            finish_failed(sweep_dir / str(number), "interrupted", f"stopped by SIGINT: {jobs[number]} is cancelled")
        raise


class _Task:
    """The callable that submitit runs in every task of the array; each task is one rank."""

    def __init__(self, entry: str) -> None:
        self._entry = entry

    def __call__(self, job_dir: str) -> None:
        """Run the rank and end the process.

        It does not return, because submitit takes a return as the end of the job, also when SLURM queues the job again.
        """
        from runner.launch.slurm.job import main

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        leave(main(Path(job_dir), self._entry))


def _parameters(settings: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Translate the settings of Hydra's launcher to submitit's: the ranks per node, and one failed rank ends the
    others.
    """
    given = {key: value for key, value in settings.items() if not key.startswith("_")}
    for key in ("submitit_folder", "max_num_timeout"):
        del given[key]
    ranks = _ranks(config) // int(given["nodes"])
    given["tasks_per_node"] = ranks
    given["cpus_per_task"] = given["cpus_per_task"] or config.trainer.threads + config.data.workers
    if config.device == "cuda" and given["gpus_per_node"] is None and given["gpus_per_task"] is None:
        given["gpus_per_node"] = ranks
    own = {key if key in _OF_EXECUTOR else f"slurm_{key}": value for key, value in given.items() if value is not None}
    own["stderr_to_stdout"] = own.pop("slurm_stderr_to_stdout", True)
    return own | {"slurm_srun_args": ["--kill-on-bad-exit=1"]}


def _ranks(config: RunConfig) -> int:
    degrees = config.parallelism
    return degrees.pipeline * degrees.data * degrees.tensor


def _account(job_dir: Path, job: str, state: str) -> None:
    logger.info("job %s: %s", job_dir.name, complete_record(job_dir, job, state).status)


def _read(sweep_dir: Path) -> dict[int, str]:
    with contextlib.suppress(FileNotFoundError):
        return {int(number): job for number, job in json.loads((sweep_dir / ARRAY_FILE).read_text()).items()}
    return {}


def _write(sweep_dir: Path, jobs: Mapping[int, str]) -> None:
    write_atomically(sweep_dir / ARRAY_FILE, json.dumps(jobs, indent=1) + "\n")
