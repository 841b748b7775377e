"""The batch script of a run, which contains all that SLURM is told.

Source: sbatch(1) and srun(1) of SLURM 22.05.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.config.schema import RunConfig
from runner.launch.processes.meeting import TOKEN_VARIABLE

__all__ = ["LOG_FILE", "SCRIPT_FILE", "batch_script", "cpus_per_rank", "ranks_per_node"]

_PLAIN = re.compile(r"[\w.,:@+/=-]+")  # no character of these means anything to sbatch
SCRIPT_FILE = "job.sh"
LOG_FILE = Path("logs") / "slurm.log"


def batch_script(config: RunConfig, run_dir: Path, command: Sequence[str], *, working_directory: Path) -> str:
    """Return the text of the batch script.

    Args:
        config: the resolved request.
        run_dir: the run's directory, on a file system that all nodes share.
        command: what each rank runs.
        working_directory: where the ranks start, so that a user's own modules are found.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(config, run_dir)), ""]
    lines += [f"cd {shlex.quote(str(working_directory))} || exit 1"]
    lines += map(_setup_line, config.launcher.setup)
    # Since SLURM 22.05, a step no longer takes --cpus-per-task from its job (srun(1)).
    lines += ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"']
    # Only processes of this job can meet under it.
    lines += [f"export {TOKEN_VARIABLE}=\"$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\""]
    # The ranks are the step, so signals for the job reach them; a rank that fails ends the others.
    prefix = shlex.split(config.launcher.prefix or "")
    lines += [f"exec srun --kill-on-bad-exit=1 {shlex.join([*prefix, *command])}", ""]
    return "\n".join(lines)


def _setup_line(line: str) -> str:
    """A shell line of the user's, which takes effect in the batch script and cannot break it.

    It is one quoted word that the shell reads again: an open quote in it is an error of this line alone. A line that
    fails ends the job, and its log says which.
    """
    said = shlex.quote(f"launcher.setup failed: {line}")
    return f"eval {shlex.quote(line)} || {{ echo {said} >&2; exit 1; }}"


def cpus_per_rank(config: RunConfig) -> int:
    """The number of CPUs that each rank asks SLURM for."""
    return config.launcher.cpus_per_task or config.trainer.threads + config.data.workers


def ranks_per_node(config: RunConfig) -> int:
    """The number of ranks on each machine."""
    degrees = config.parallelism
    return degrees.pipeline * degrees.data * degrees.tensor // (config.launcher.nodes or 1)


def _options(config: RunConfig, run_dir: Path) -> Iterator[str]:
    launcher, ranks = config.launcher, ranks_per_node(config)
    yield _option("--job-name", re.sub(r"\s+", " ", config.name))
    yield f"--nodes={launcher.nodes or 1}"
    yield f"--ntasks-per-node={ranks}"
    yield f"--cpus-per-task={cpus_per_rank(config)}"
    gpus = launcher.gpus_per_node
    if gpus is None and config.device == "cuda":
        gpus = ranks
    if gpus:
        yield f"--gpus-per-node={gpus}"
    if launcher.time_limit is not None:
        yield f"--time={launcher.time_limit}"
    if launcher.partition is not None:
        yield _option("--partition", launcher.partition)
    if launcher.account is not None:
        yield _option("--account", launcher.account)
    # SLURM sends it to the processes of the step this long before the limit, or at once if it preempts the job.
    yield f"--signal=USR1@{launcher.signal_seconds}"
    yield "--requeue" if launcher.requeue else "--no-requeue"
    yield _option("--output", str(run_dir / LOG_FILE).replace("%", "%%"))
    yield "--open-mode=append"  # a job that is queued again appends to its log
    for option in launcher.sbatch:
        name, equals, value = option.partition("=")
        yield _option(name, value) if equals else name


def _option(name: str, value: str) -> str:
    """An option as sbatch reads it from a line of the script: within double quotes, a backslash keeps the character
    after it (``_get_argument`` of SLURM's src/sbatch/opt.c)."""
    if _PLAIN.fullmatch(value):
        return f"{name}={value}"
    return f'{name}="' + re.sub(r'(["\\])', r"\\\1", value) + '"'
