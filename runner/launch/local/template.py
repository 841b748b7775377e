"""The template process from which ranks are forked, so that they share its imports.

:mod:`runner.launch.local.forked` starts it as ``python -m runner.launch.local.template IMPORTS ORDERS_FD REPORT_FD
GATE_FD``, with those environment variables of a rank that the imports read. IMPORTS is JSON, see :func:`imports_of`;
the orders are :class:`Orders`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config.schema import RunConfig
from runner.late import import_late
from runner.launch.failure import log_file
from runner.launch.processes.stops import ignore_preemption
from runner.launch.processes.supervise import die_with_parent
from runner.launch.rank import rank_variables, run
from runner.noise import hide_noise
from runner.optim.catalogue.registry import optimizer_of

__all__ = ["Orders", "import_all", "imports_of", "main"]

_PR_SET_NAME = 15
_THAT_ASKED = {"lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"}
"""Modules that read the rank's number when they are imported, and keep it."""
_MOST_BYTES = 1 << 16  # bytes of orders per read


@dataclass(frozen=True, slots=True)
class Orders:
    """What the template shall fork.

    Args:
        count: number of ranks.
        environment: the variables that are the same for all ranks.
    """

    config_file: str
    run_dir: str
    entry: str
    count: int
    environment: Mapping[str, str]


def main(imports: Sequence[str], orders_fd: int, tell: int, gate: int) -> None:
    """Run the template: import, wait for the orders, and fork the ranks if that is safe."""
    hide_noise()
    import_late()
    import_all(imports)
    received = _receive(orders_fd)
    if received is None or not _is_alone():
        return
    orders, descriptors = received
    os.environ.update(orders.environment)
    gc.freeze()  # the ranks' collections then leave alone what was imported here, and the pages that it is on
    for rank in range(orders.count):
        if os.fork() == 0:
            run_dir = Path(orders.run_dir)
            _become(rank, run_dir, *descriptors)
            _wait_to_begin(rank, tell, gate)
            run(Path(orders.config_file), run_dir, orders.entry)


def _receive(orders_fd: int) -> tuple[Orders, list[int]] | None:
    """Return the orders and what ranks inherit: the store's socket, the file of reports, that of pulses.

    None if the parent has ended.
    """
    with socket.socket(fileno=orders_fd) as source:
        said, descriptors, _, _ = socket.recv_fds(source, _MOST_BYTES, 3)
        while more := source.recv(_MOST_BYTES):
            said += more
    return (Orders(**json.loads(said)), descriptors) if descriptors else None


def imports_of(config: RunConfig, entry: str) -> list[str]:
    """What every rank of a request imports: modules, or functions that import, as ``module:function``.

    A user's own modules are imported by the ranks themselves: they may read the rank's number or start threads.
    """
    imports = [entry.partition(":")[0]]
    if config.zero.stage is not None:
        imports.append("runner.launch.local.template:import_deepspeed")
    if config.compile:
        imports.append("torch._dynamo.eval_frame")  # with it the whole compiler, which is imported late otherwise
    return [*imports, *optimizer_of(config.optimizer).imports]


def import_all(imports: Sequence[str]) -> None:
    """Import them. An import that fails here fails again in the ranks, which report it."""
    for each in imports:
        module, _, function = each.partition(":")
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()


def import_deepspeed() -> None:
    """Import DeepSpeed for ranks on CPUs."""
    from runner.strategy.zero.stage import import_deepspeed

    import_deepspeed("cpu")


def _is_alone() -> bool:
    """Whether this process has no other thread: a lock that a thread holds at a fork stays locked in the child.

    Some libraries (OpenBLAS) end their threads at a fork and start them again when needed; a first fork makes them do
    so.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _become(rank: int, run_dir: Path, store: int, reports: int, pulses: int) -> None:
    """Give this forked process what an executed rank would have: session, name, environment, log, random seeds."""
    import numpy
    import torch

    os.setsid()
    # For ps and top, because the command line is still the template's.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"rank %d" % rank)
    os.environ.update(rank_variables(rank, store, reports, pulses))
    if rank > 0:
        os.close(store)
        log = os.open(log_file(run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
    numpy.random.seed()  # Python's own generator reseeds itself after a fork
    torch.default_generator.seed()
    for module in _THAT_ASKED.intersection(sys.modules):
        sys.modules[module].rank_zero_only.rank = rank


def _wait_to_begin(rank: int, tell: int, gate: int) -> None:
    """Report that this rank exists, and wait until the process that started the template is its parent."""
    os.write(tell, b"%d %d\n" % (rank, os.getpid()))
    os.close(tell)
    if not os.read(gate, 1):
        os._exit(1)
    os.close(gate)


if __name__ == "__main__":
    die_with_parent()
    ignore_preemption()
    faulthandler.enable()
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:5]))
    os._exit(0)  # functions registered with atexit must run in the ranks only
