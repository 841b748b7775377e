"""Makes this process the rank that something else has started it as: mpirun, or whatever sets torch's variables.

No message travels over MPI. Sources: Open MPI's documentation, "Environment variables set by mpirun"
(OMPI_COMM_WORLD_*); what mpiexec of MPICH and Intel MPI (Hydra) sets (PMI_*, MPI_LOCAL*); torch.distributed's
documentation, "Environment variable initialization".
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import Problem, raise_problems
from runner.launch.processes.meeting import BY_VARIABLES, FIRST_PORT, MEETING_VARIABLE, NUM_PORTS

__all__ = ["become_rank", "complete_rank", "num_ranks"]

_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # the same in all ranks that one mpirun has started


class _Names(NamedTuple):
    """The variables in which an mpirun tells a process its numbers."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _names(environment: Mapping[str, str]) -> _Names:
    """Those of Hydra only where it has named all of them: srun sets the first two, too."""
    return _HYDRA if all(name in environment for name in _HYDRA) else _OPEN_MPI


def num_ranks(environment: Mapping[str, str] | None = None) -> int:
    """The number of processes that mpirun has started, including this one; 0 outside mpirun."""
    found = os.environ if environment is None else environment
    return int(found.get(_names(found).size, "0"))


def become_rank(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a rank; an address and a port that are set already are kept.

    Raises:
        RequestError: a variable is missing, or the ranks are on several machines, and nothing tells where rank 0 is.
    """
    names = _names(environment)
    for name in names:
        if name not in environment:
            why, fix = f"{names.size} is set, and mpirun sets both", f"env -u {names.size} runner …"
            raise_problems([Problem(name, None, "must be set", why, fix)])
    rank, world_size, local_size = (int(environment[name]) for name in (names.rank, names.size, names.local_size))
    job = next((environment[name] for name in _JOB if name in environment), None)
    if local_size == world_size:
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        job = job or _proxy()
    _ask_for(environment, "MASTER_ADDR", "NODE")
    if job is None:
        _ask_for(environment, "MASTER_PORT", "29500")
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + zlib.crc32(str(job).encode()) % NUM_PORTS))
    environment.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": environment[names.local_rank],
            "GROUP_RANK": str(rank // local_size),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            MEETING_VARIABLE: "1",
        }
    )


def _proxy() -> str | None:
    """The process by which Hydra has started all ranks of this machine, as it names no job; between may be others."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1:
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")
            if "(hydra" in head:
                return str(pid)
            pid = int(tail.split()[1])
    return None


def _ask_for(environment: Mapping[str, str], name: str, value: str) -> None:
    if name not in environment:
        why = "mpirun tells the ranks of several machines neither rank 0's name nor its address and port"
        setting = f"-x {name}={value}" if _names(environment) is _OPEN_MPI else f"-genv {name} {value}"
        raise_problems([Problem(name, None, "must be set", why, f"mpirun {setting} …")])


def complete_rank(environment: MutableMapping[str, str]) -> bool:
    """Whether torch's variables say that this process is one of several ranks, which then meet at rank 0's address.

    A process that ignored them would train alone what each of its neighbours trains, too, in the same directory.

    Raises:
        RequestError: a variable is no number, is too large, or is missing and cannot be known.
    """
    if not all(name in environment for name in _GIVEN) or _number(environment, "WORLD_SIZE") < 2:
        return False
    _number(environment, "MASTER_PORT")
    for name, one in ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"):
        if name not in environment:
            why = f"{', '.join(_GIVEN)} make this process a rank, whose place on its machine is unknown"
            fix = f"{name}={one} runner … where each rank has a machine, or env -u RANK runner … for a run of its own"
            raise_problems([Problem(name, None, "must be set", why, fix)])
    for name, size in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("RANK", "WORLD_SIZE"):
        if not 0 <= _number(environment, name) < _number(environment, size):
            rule, why = f"must be at least 0 and below {size}", f"{size} is {environment[size]}"
            raise_problems(
                [Problem(name, environment[name], rule, why, f"env -u {name} runner … for a run of its own")]
            )
    local, world = (_number(environment, name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if local > world:
        rule, why = "must be at most WORLD_SIZE", f"WORLD_SIZE is {world}"
        raise_problems([Problem("LOCAL_WORLD_SIZE", local, rule, why, "env -u RANK runner … for a run of its own")])
    environment[MEETING_VARIABLE] = BY_VARIABLES
    return True


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        why = "Whatever starts ranks sets it in each of them"
        raise_problems([Problem(name, environment[name], "must be a whole number", why, f"env -u {name} runner …")])
        raise
