"""Sets the variables that torchrun's ranks have from those that mpirun gives its processes.

No message travels over MPI. Source: Open MPI's documentation, "Environment variables set by mpirun"
(OMPI_COMM_WORLD_*).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, MutableMapping

from runner.errors import Problem, raise_problems
from runner.launch.processes.meeting import FIRST_PORT, MEETING_VARIABLE, NUM_PORTS

__all__ = ["become_rank", "num_ranks"]

_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # the same in all ranks that one mpirun has started


def num_ranks(environment: Mapping[str, str] | None = None) -> int:
    """The number of processes that mpirun has started, including this one; 0 outside mpirun."""
    found = os.environ if environment is None else environment
    return int(found.get("OMPI_COMM_WORLD_SIZE", "0"))


def become_rank(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a rank; an address and a port that are set already are kept.

    Raises:
        RequestError: a variable is missing, or the ranks are on several machines, and nothing tells where rank 0 is.
    """
    for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE"):
        if f"OMPI_COMM_WORLD_{name}" not in environment:
            why = "OMPI_COMM_WORLD_SIZE is set, and mpirun sets both"
            fix = "env -u OMPI_COMM_WORLD_SIZE runner …"
            raise_problems([Problem(f"OMPI_COMM_WORLD_{name}", None, "must be set", why, fix)])
    rank, world_size = int(environment["OMPI_COMM_WORLD_RANK"]), num_ranks(environment)
    local_size = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if local_size == world_size:
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in environment:
        why = "mpirun tells the ranks of several machines neither rank 0's name nor its address"
        raise_problems([Problem("MASTER_ADDR", None, "must be set", why, "mpirun -x MASTER_ADDR=NODE …")])
    job = next((environment[name] for name in _JOB if name in environment), "")
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS))
    environment.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": environment["OMPI_COMM_WORLD_LOCAL_RANK"],
            "GROUP_RANK": str(rank // local_size),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            MEETING_VARIABLE: "1",
        }
    )
