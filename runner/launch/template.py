"""The process that ranks are forked from, so that they share its imports: :mod:`runner.launch.forked` starts it.

``python -m runner.launch.template CONFIG_FILE RUN_DIR MODULE:FUNCTION STORE_FD RANKS REPORT_FD GATE_FD``, with the
environment of a rank but for what ranks differ in (:func:`runner.launch.rank.rank_variables`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from runner.config.resolve import load
from runner.config.schema import RunConfig
from runner.launch.failure import log_file
from runner.launch.rank import load_entry, rank_variables, run
from runner.launch.supervise import die_with_parent, ignore_preemption

__all__ = ["import_for", "main"]

_PR_SET_NAME = 15
_OPTIMIZERS = {
    "cpu_adam": "runner.optim.deepspeed",
    "adam4bit": "runner.optim.few_bits",
    "adam_fp8": "runner.optim.few_bits",
    "lars": "runner.optim.large_batch",
    "lamb": "runner.optim.large_batch",
}
"""The modules of optimizers that import a library."""
_THAT_ASKED = {"lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"}
"""What reads the rank's number when it is imported, and keeps it."""


def main(config_file: Path, run_dir: Path, entry: str, store: int, count: int, tell: int, gate: int) -> None:
    """Be the template: import, and fork the ranks, if that is safe."""
    import_for(load(config_file), entry)
    if not _is_alone():
        return
    for rank in range(count):
        if os.fork() == 0:
            _become(rank, run_dir, store)
            _wait_to_begin(rank, tell, gate)
            run(config_file, run_dir, entry)


def _is_alone() -> bool:
    """Whether no other thread runs here: a lock that one holds at a fork would be held for ever in the child.

    Libraries that end their threads at a fork, and begin them again when needed (OpenBLAS), do so at a first one.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task")) == 1


def import_for(config: RunConfig, entry: str) -> None:
    """Import what every rank of the request will. What fails fails in the ranks again, which say so.

    A user's own modules are left to the ranks: they may look at the rank's number, or begin threads.
    """
    imports: list[Callable[[], object]] = [partial(load_entry, entry)]
    if config.zero.stage is not None:
        imports.append(_import_deepspeed)
    if config.optimizer.name in _OPTIMIZERS:
        imports.append(partial(importlib.import_module, _OPTIMIZERS[config.optimizer.name]))
    for one in imports:
        with contextlib.suppress(Exception):
            one()


def _import_deepspeed() -> None:
    from runner.strategy.deepspeed_stage import import_deepspeed

    import_deepspeed("cpu")


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
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:8]))
    os._exit(0)  # what is registered for the end of a process is the ranks' to do
