"""Makes this process the rank that something else has started it as: mpirun, or whatever sets torch's variables.

No message travels over MPI. Sources: Open MPI's documentation, "Environment variables set by mpirun"
(OMPI_COMM_WORLD_*); torch.distributed's, "Environment variable initialization".
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, MutableMapping

from runner.errors import Problem, raise_problems
from runner.launch.processes.meeting import FIRST_PORT, MEETING_VARIABLE, NUM_PORTS

__all__ = ["become_rank", "complete_rank", "num_ranks"]

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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


def complete_rank(environment: MutableMapping[str, str]) -> bool:
    """Whether torch's variables say that this process is one of several ranks; if so, set those that follow from them.

    A process that ignored them would train alone what each of its neighbours trains, too, in the same directory.

    Raises:
        RequestError: a variable is no number, is too large, or is missing and cannot be known.
    """
    if not all(name in environment for name in _GIVEN) or _number(environment, "WORLD_SIZE") < 2:
        return False
    for name, one in ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"):
        if name not in environment:
            why = f"{', '.join(_GIVEN)} make this process a rank, whose place on its machine is unknown"
            fix = f"{name}={one} runner … where each rank has a machine, or env -u RANK runner … for a run of its own"
            raise_problems([Problem(name, None, "must be set", why, fix)])
    for name, size in ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not 0 <= _number(environment, name) < _number(environment, size):
            rule, why = f"must be at least 0 and below {size}", f"{size} is {environment[size]}"
            raise_problems(
                [Problem(name, environment[name], rule, why, f"env -u {name} runner … for a run of its own")]
            )
    environment[MEETING_VARIABLE] = "1"
    return True


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        why = "Whatever starts ranks sets it in each of them"
        raise_problems([Problem(name, environment[name], "must be a whole number", why, f"env -u {name} runner …")])
        raise
