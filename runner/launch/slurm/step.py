"""Sets the variables that torchrun's ranks have from those that srun gives its tasks.

Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.launch.processes.meeting import FIRST_PORT, MEETING_VARIABLE, NUM_PORTS
from runner.launch.slurm.requeue import requeue

__all__ = ["Step", "current_step", "without_job"]

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a job, as one of its tasks sees it.

    Args:
        job: the job's number, ``<array>_<index>`` for a job of an array.
        number: number of the step in its job.
        restarts: how often the job has been queued again.
        rank, local_rank, node: this task's number in the step, its number on its node, and the number of the node.
        nodes: the names of the nodes as SLURM writes such a list, e.g. ``n[1-2]``.
        tasks: number of tasks on each node.
    """

    job: str
    number: str
    restarts: int
    rank: int
    local_rank: int
    node: int
    nodes: str
    tasks: tuple[int, ...]

    @property
    def place(self) -> str:
        """A name for the step that stays the same when the job is queued again."""
        return f"{self.job}.{self.number}"

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    def line(self, config: RunConfig) -> str:
        """One line for the log with SLURM's layout and the plan's."""
        degrees = config.parallelism
        shape = f"pipeline {degrees.pipeline} x data {degrees.data} x tensor {degrees.tensor}"
        tasks = " + ".join(map(str, self.tasks)) if len(set(self.tasks)) > 1 else f"{len(self.tasks)} x {self.tasks[0]}"
        again = f", start {self.restarts + 1}" if self.restarts else ""
        return f"SLURM job {self.job}{again}: {tasks} ranks on {self.nodes}; the plan: {shape}"

    def problems(self, config: RunConfig) -> list[Problem]:
        """Problems if SLURM's layout cannot be that of the request."""
        if len(set(self.tasks)) > 1:
            shown = ", ".join(map(str, self.tasks))
            why = f"The nodes {self.nodes} have {shown} of them"
            return [Problem("launcher", "slurm", "every node must run as many ranks", why, "srun --ntasks-per-node")]
        nodes = config.launcher.nodes if config.launcher.name == "slurm" else None
        if nodes is not None and nodes != len(self.tasks):
            why = f"srun started ranks on {self.nodes}"
            return [Problem("launcher.nodes", nodes, f"must be {len(self.tasks)}", why, f"srun --nodes={nodes}")]
        return []

    def queue_again(self) -> bool:
        """Put the job back into the queue, see :func:`runner.launch.slurm.requeue.requeue`."""
        return requeue(self.job)

    def become_rank(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables of a rank; an address and a port that are set already are kept."""
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        environment.setdefault("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(self.nodes))
        port = FIRST_PORT + zlib.crc32(f"{self.place}.{self.restarts}".encode()) % NUM_PORTS
        environment.setdefault("MASTER_PORT", str(port))
        environment.update(
            {
                "RANK": str(self.rank),
                "LOCAL_RANK": str(self.local_rank),
                "GROUP_RANK": str(self.node),
                "WORLD_SIZE": str(self.num_tasks),
                "LOCAL_WORLD_SIZE": str(self.tasks[self.node]),
                MEETING_VARIABLE: "1",
            }
        )


@contextlib.contextmanager
def without_job() -> Iterator[None]:
    """Hide the job in which this process runs, because sbatch takes its variables as options of the new job."""
    hidden = {name: os.environ[name] for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def current_step(environment: Mapping[str, str] | None = None) -> Step | None:
    """The step of which this process is a task, or None."""
    found = os.environ if environment is None else environment
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"} <= found.keys():
        return None
    array, job = found.get("SLURM_ARRAY_JOB_ID"), found["SLURM_JOB_ID"]
    return Step(
        job=f"{array}_{found['SLURM_ARRAY_TASK_ID']}" if array else job,
        number=found["SLURM_STEP_ID"],
        restarts=int(found.get("SLURM_RESTART_COUNT", "0")),
        rank=int(found["SLURM_PROCID"]),
        local_rank=int(found["SLURM_LOCALID"]),
        node=int(found["SLURM_NODEID"]),
        nodes=found["SLURM_STEP_NODELIST"],
        tasks=tasks_per_node(found["SLURM_STEP_TASKS_PER_NODE"]),
    )


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Parse SLURM's ``2(x2),1`` to ``(2, 2, 1)``.

    Raises:
        ValueError: SLURM writes it in another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
