"""The process that ranks are forked from, so that they share its imports.

:mod:`runner.launch.local.forked` starts it as ``python -m runner.launch.local.template IMPORTS ORDERS_FD REPORT_FD
GATE_FD``, with those variables of a rank's environment that its imports look at. IMPORTS is JSON, see
:func:`imports_of`; the orders are :class:`Orders`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config.schema import RunConfig
from runner.launch.failure import log_file
from runner.launch.local.supervise import die_with_parent, ignore_preemption
from runner.launch.rank import rank_variables, run

__all__ = ["Orders", "import_all", "imports_of", "main"]

_PR_SET_NAME = 15
_OPTIMIZERS = {
    "cpu_adam": "runner.optim.kinds.deepspeed",
    "adam4bit": "runner.optim.kinds.few_bits",
    "adam_fp8": "runner.optim.kinds.few_bits",
    "lars": "runner.optim.kinds.large_batch",
    "lamb": "runner.optim.kinds.large_batch",
}
"""The modules of optimizers that import a library."""
_THAT_ASKED = {"lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"}
"""What reads the rank's number when it is imported, and keeps it."""
_MOST_BYTES = 1 << 16  # of orders, in one read


@dataclass(frozen=True, slots=True)
class Orders:
    """What the template forks.

    Args:
        count: how many ranks.
        environment: what is the same in those of all ranks.
    """

    config_file: str
    run_dir: str
    entry: str
    count: int
    environment: Mapping[str, str]


def main(imports: Sequence[str], orders_fd: int, tell: int, gate: int) -> None:
    """Be the template: import, wait for orders, and fork the ranks, if that is safe."""
    import_all(imports)
    received = _receive(orders_fd)
    if received is None or not _is_alone():
        return
    orders, store = received
    os.environ.update(orders.environment)
    for rank in range(orders.count):
        if os.fork() == 0:
            run_dir = Path(orders.run_dir)
            _become(rank, run_dir, store)
            _wait_to_begin(rank, tell, gate)
            run(Path(orders.config_file), run_dir, orders.entry)


def _receive(orders_fd: int) -> tuple[Orders, int] | None:
    """The orders and the store's socket; None where nobody is left to give any."""
    with socket.socket(fileno=orders_fd) as source:
        said, descriptors, _, _ = socket.recv_fds(source, _MOST_BYTES, 1)
        while more := source.recv(_MOST_BYTES):
            said += more
    return (Orders(**json.loads(said)), descriptors[0]) if descriptors else None


def imports_of(config: RunConfig, entry: str) -> list[str]:
    """What every rank of a request imports: modules, or functions that import, as ``module:function``.

    A user's own modules are left to the ranks: they may look at the rank's number, or begin threads.
    """
    imports = [entry.partition(":")[0]]
    if config.zero.stage is not None:
        imports.append("runner.launch.local.template:import_deepspeed")
    if config.optimizer.name in _OPTIMIZERS:
        imports.append(_OPTIMIZERS[config.optimizer.name])
    return imports


def import_all(imports: Sequence[str]) -> None:
    """Import them. What fails fails in the ranks again, which say so."""
    for each in imports:
        module, _, function = each.partition(":")
        with contextlib.suppress(Exception):
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()


def import_deepspeed() -> None:
    """DeepSpeed for ranks on CPUs."""
    from runner.strategy.zero.stage import import_deepspeed

    import_deepspeed("cpu")


def _is_alone() -> bool:
    """Whether no other thread runs here: a lock that one holds at a fork would be held for ever in the child.

    Libraries that end their threads at a fork, and begin them again when needed (OpenBLAS), do so at a first one.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def _become(rank: int, run_dir: Path, store: int) -> None:
    """Make this process what an executed rank would be."""
    import numpy
    import torch

    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"rank %d" % rank)  # for ps and top: the command line is the template's
    os.environ.update(rank_variables(rank, store))
    if rank > 0:
        os.close(store)
        log = os.open(log_file(run_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
    numpy.random.seed()  # Python's generator sees to this itself
    torch.default_generator.seed()
    for module in _THAT_ASKED.intersection(sys.modules):
        sys.modules[module].rank_zero_only.rank = rank


def _wait_to_begin(rank: int, tell: int, gate: int) -> None:
    """Say that this rank is there, and wait until its parent is who started the template."""
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
    os._exit(0)  # what is registered for the end of a process is the ranks' to do
