"""Ranks on several machines meet at rank 0's store, or report in time which ranks did not come, and why."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from runner.errors import RunFailedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "BY_VARIABLES",
    "FIRST_PORT",
    "MEETING_VARIABLE",
    "NUM_PORTS",
    "TOKEN_VARIABLE",
    "meet",
    "of_this_run",
    "way_out",
]

MEETING_VARIABLE = "RUNNER_MEETS"
"""Environment variable that is set in a rank that srun, mpirun or something else has started."""
BY_VARIABLES = "torch"
"""Its value where torch's variables alone, which may be left over from something else, make a process a rank."""
TOKEN_VARIABLE = "RUNNER_STORE_TOKEN"
"""Environment variable with a secret of the run, under which its ranks meet."""
FIRST_PORT, NUM_PORTS = 10_000, 20_000  # below the ports that operating systems use for outgoing connections

_HERE = "runner/here"


def meet(timeout_seconds: float) -> Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, which rank 0 opens, once every rank is connected.

    Raises:
        RunFailedError: a name does not resolve, a port is in use, or some ranks did not come in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    who = f"rank {rank} on {socket.gethostname()}"
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        fix = "set MASTER_ADDR to a name or address of rank 0's node that all nodes know"
        raise RunFailedError(f"{who} cannot resolve {address}, rank 0's node ({error.args[-1]}): {fix}") from error
    store = of_this_run(_open(who, address, port, rank, world_size, timeout_seconds))
    _wait_for_all(store, who, rank, world_size, timeout_seconds)
    return store


def way_out() -> str:
    """What a user may do in whose process a left-over variable made a rank; empty in other ranks."""
    return "env -u RANK runner … for a run of its own" if os.environ.get(MEETING_VARIABLE) == BY_VARIABLES else ""


def of_this_run(store: Store) -> Store:
    """The part of a store that only ranks of this run find, because its keys begin with the run's secret.

    Any user of the machine may connect to the store. Without the secret, a process can neither read what the ranks tell
    one another, nor pass for one of them. Where a launcher of others gives no secret, it is the whole store.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not in its __all__

    token = os.environ.get(TOKEN_VARIABLE)
    return PrefixStore(token, store) if token else store


def _open(who: str, address: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    try:
        store: Store = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are such
        said = str(error).splitlines()[0]
        if rank == 0:
            why = f"{who} cannot open port {port} for the others ({said}): set MASTER_PORT to a free one"
        else:
            why = f"{who} did not reach rank 0 at {address}:{port} in {timeout_seconds:g} s ({said})"
        raise RunFailedError(why) from error
    return store


def _wait_for_all(store: Store, who: str, rank: int, world_size: int, timeout_seconds: float) -> None:
    keys = [f"{_HERE}/{number}" for number in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        try:
            absent = [number for number, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise RunFailedError(f"{who} lost rank 0 while the ranks met ({error})") from error
        missing = ", ".join(map(str, absent))
        told = (
            f"{who} waited {timeout_seconds:g} s for {len(absent)} of {world_size} ranks that did not come: {missing}"
        )
        raise RunFailedError(f"{told}. Or try {out}" if (out := way_out()) else told) from error
