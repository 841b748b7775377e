"""One rank of a run: ``python -m runner.launch.rank CONFIG_FILE RUN_DIR [MODULE:FUNCTION]``.

The parent starts it from the resolved configuration's file, with the usual variables (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``); the store's listening socket is inherited by rank 0, so that no
other process can take the port in between.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from runner.config.schema import RunConfig
from runner.launch.failure import RankFailure, error_file, log_file
from runner.launch.local.meeting import MEETING_VARIABLE, meet
from runner.launch.local.supervise import die_with_parent, ignore_preemption

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "STORE_FD_VARIABLE",
    "TORCHRUN_VARIABLE",
    "TRAIN_ENTRY",
    "RankEntry",
    "leave",
    "load_entry",
    "main",
    "open_store",
    "prepare_process",
    "process_group",
    "rank_variables",
    "report_failure",
    "run",
    "uses_cuda",
]

RankEntry = Callable[[RunConfig, Path], bool | None]
"""Returns whether it stopped early because it was asked to."""

TRAIN_ENTRY = "runner.training.run:run_rank"
STORE_FD_VARIABLE = "RUNNER_STORE_FD"
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


def main(config_file: Path, run_dir: Path, entry: str = TRAIN_ENTRY) -> int:
    """Run this process's rank to its end; returns its exit status, with the reason in the rank's error file."""
    from runner.config.compose.resolve import load

    try:
        config = load(config_file)
        prepare_process(config)
        with process_group(config, open_store(config)):
            load_entry(entry)(config, run_dir)
    except Exception as error:
        return report_failure(error, run_dir, int(os.environ["RANK"])).exit_status
    return 0


def rank_variables(rank: int, store_fd: int) -> dict[str, str]:
    """What the environments of the ranks of one machine differ in.

    Args:
        store_fd: the store's listening socket, as rank 0 inherits it.
    """
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return own if rank else own | {STORE_FD_VARIABLE: str(store_fd)}


def report_failure(error: Exception, run_dir: Path, rank: int) -> RankFailure:
    """Leave the rank's error file, and the traceback of what the runner does not explain in its log."""
    failure = RankFailure.of(error)
    failure.save(error_file(run_dir, rank))
    if not failure.explained:
        with log_file(run_dir, rank).open("a", encoding="utf-8") as log:
            log.write(failure.traceback)
    return failure


def prepare_process(config: RunConfig) -> None:
    """Threads of this process, before anything computes."""
    import torch

    torch.set_num_threads(config.trainer.threads)


def load_entry(entry: str) -> RankEntry:
    """The function that ``module:function`` names; it is called on every rank."""
    module, _, function = entry.partition(":")
    found: RankEntry = getattr(importlib.import_module(module), function)
    return found


def open_store(config: RunConfig) -> Store | None:
    """The key-value store that the ranks meet in: over the parent's socket, torchrun's, or at rank 0's node.

    None for a single rank.

    ``launcher.rendezvous_timeout_seconds`` is how long ranks wait for one another.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
    from torch.distributed.rendezvous import rendezvous

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return None
    timeout = timedelta(seconds=config.launcher.rendezvous_timeout_seconds)
    if TORCHRUN_VARIABLE in os.environ:
        found: Store = next(rendezvous("env://", timeout=timeout))[0]
        return found
    if MEETING_VARIABLE in os.environ:
        return meet(config.launcher.rendezvous_timeout_seconds)
    store: Store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[STORE_FD_VARIABLE]) if rank == 0 else None,
    )
    return store


@contextlib.contextmanager
def process_group(config: RunConfig, store: Store | None) -> Iterator[None]:
    """The process group of all ranks, for as long as the block runs: Gloo on CPU, NCCL on CUDA. None for one rank."""
    import torch.distributed

    if store is None:
        yield
        return
    if uses_cuda(config):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        "nccl" if uses_cuda(config) else "gloo",
        timeout=timedelta(seconds=config.launcher.rendezvous_timeout_seconds),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield
    # Only where the block ended well: after an error the peers may be gone, and leaving in order could wait for them.
    torch.distributed.destroy_process_group()


def uses_cuda(config: RunConfig) -> bool:
    """Whether this run's tensors live on CUDA devices."""
    from runner.model.device import device_type

    return device_type(config) == "cuda"


def leave(status: int) -> NoReturn:
    """End the process without the interpreter's own teardown.

    There, threads of torch's communication abort now and then although everything is done (see
    :func:`runner.engine.transport.processes.destroy_process_groups`), and after a failure they may wait for peers
    that are gone. What others registered for the end of the process still runs.
    """
    atexit._run_exitfuncs()
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(config_file: Path, run_dir: Path, entry: str = TRAIN_ENTRY) -> NoReturn:
    """Be a rank that this machine's supervisor has started, to the end of the process."""
    die_with_parent()
    ignore_preemption()  # the parent decides, and tells by SIGTERM
    faulthandler.enable()
    leave(main(config_file, run_dir, entry))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
