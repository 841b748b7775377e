"""One rank of a run: ``python -m runner.launch.rank CONFIG_FILE RUN_DIR [MODULE:FUNCTION]``.

The parent starts it with the file of the resolved configuration and the usual variables (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). Rank 0 inherits the listening socket of the store, so that no other
process can take the port in between.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from runner.config.schema import RunConfig
from runner.errors import EXIT_PREEMPTED, Problem, raise_problems
from runner.late import import_late
from runner.launch.failure import RankFailure, error_file, log_file
from runner.launch.processes.handed_over import REPORTS_VARIABLE, hand_over
from runner.launch.processes.leaving import leave
from runner.launch.processes.meeting import MEETING_VARIABLE, meet, of_this_run
from runner.launch.processes.stops import ignore_preemption
from runner.launch.processes.supervise import Endings, die_with_parent
from runner.noise import hide_noise
from runner.pulse import PULSES_VARIABLE, Phase, Pulse
from runner.training.stop_signals import StopSignals

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "ENDINGS",
    "STORE_FD_VARIABLE",
    "TORCHRUN_VARIABLE",
    "TRAIN_ENTRY",
    "RankEntry",
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
"""A function that runs a rank and returns whether it stopped early because it was asked to."""

TRAIN_ENTRY = "runner.training.run:run_rank"
EXIT_COMPLETE = 100
"""The exit status of a rank whose work is complete. It is not 0, with which any code can end a process early."""
ENDINGS = Endings(done=EXIT_COMPLETE, stopped=EXIT_PREEMPTED, killed_is_stopped=True)
"""What the exit statuses of ranks mean."""
STORE_FD_VARIABLE = "RUNNER_STORE_FD"
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


def main(config_file: Path, run_dir: Path, entry: str = TRAIN_ENTRY) -> int:
    """Run this process's rank to its end and return its exit status, see :data:`ENDINGS`.

    The reason of a failure is in the rank's error file.
    """
    from runner.config.compose.resolve import load

    try:
        config = load(config_file)
        prepare_process(config)
        with process_group(config, open_store(config)):
            StopSignals.listen((signal.SIGTERM,), before_training=_die)
            stopped = load_entry(entry)(config, run_dir)
    except (Exception, SystemExit) as error:  # code of the user's that calls sys.exit(0) has not done the rank's work
        Pulse.current().enter(Phase.EXIT)
        return report_failure(error, run_dir, int(os.environ["RANK"])).exit_status
    Pulse.current().enter(Phase.EXIT if stopped else Phase.DONE)
    return EXIT_PREEMPTED if stopped else EXIT_COMPLETE


def _die(number: int) -> None:
    """End by the signal as a process does that handles no signals: no rank has anything to save yet."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def rank_variables(rank: int, store_fd: int, reports_fd: int, pulses_fd: int) -> dict[str, str]:
    """The environment variables in which the ranks of one machine differ.

    Args:
        store_fd: the listening socket of the store, which rank 0 inherits.
        reports_fd: see :class:`runner.launch.processes.handed_over.HandedOver`.
        pulses_fd: see :class:`runner.pulse.Pulses`.
    """
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    own |= {REPORTS_VARIABLE: str(reports_fd), PULSES_VARIABLE: str(pulses_fd)}
    return own if rank else own | {STORE_FD_VARIABLE: str(store_fd)}


def report_failure(error: BaseException, run_dir: Path, rank: int) -> RankFailure:
    """Write the rank's error file, and write the traceback to its log unless the message explains all.

    If the files cannot be written, the parent is told in another way.
    """
    failure = RankFailure.of(error, run_dir)
    try:
        failure.save(error_file(run_dir, rank))
        if not failure.explained:
            with log_file(run_dir, rank).open("a", encoding="utf-8") as log:
                log.write(failure.traceback)
    except OSError:
        hand_over(rank, failure)
    return failure


def prepare_process(config: RunConfig) -> None:
    """Set what torch computes with in this process, before anything computes, and silence libraries.

    TensorFloat-32, which rounds fp32 operands to 10 bits of mantissa on GPUs, is off: torch allows it for cuDNN's
    convolutions by default, and no ``precision`` asks for it. A user's own module, imported later, may allow it.
    """
    import torch

    hide_noise()
    import_late()
    torch.set_num_threads(config.trainer.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def load_entry(entry: str) -> RankEntry:
    """Import the function that ``module:function`` names; every rank calls it."""
    module, _, function = entry.partition(":")
    found: RankEntry = getattr(importlib.import_module(module), function)
    return found


def open_store(config: RunConfig) -> Store | None:
    """Return the key-value store in which the ranks meet, or None for a single rank.

    It is opened over the parent's socket, by torchrun, or at rank 0's node. Ranks wait for one another for
    ``launcher.rendezvous_timeout_seconds``.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__
    from torch.distributed.rendezvous import rendezvous

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return None
    timeout = timedelta(seconds=config.launcher.rendezvous_timeout_seconds)
    if TORCHRUN_VARIABLE in os.environ:
        found: Store = next(rendezvous("env://", timeout=timeout))[0]
        return of_this_run(found)
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
    return of_this_run(store)


def _check_interface() -> None:
    """Refuse the name of a network interface that this machine has not."""
    names, known = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name and name not in known:
            why = f"This machine has {', '.join(known)}"
            others = [each for each in known if not each.startswith("lo")]  # ranks of other machines do not hear on it
            fix = f"GLOO_SOCKET_IFNAME={(others or known)[0]}" if known else ""
            raise_problems([Problem("GLOO_SOCKET_IFNAME", name, "must be a network interface", why, fix)])


@contextlib.contextmanager
def process_group(config: RunConfig, store: Store | None) -> Iterator[None]:
    """Hold the process group of all ranks while the block runs: none for a single rank.

    It is NCCL's if each rank has a CUDA device of its own, else Gloo's.

    The ranks have met at the store already. From here on they may wait for one another as long as a step may take.
    """
    import torch.distributed

    from runner.model.device import backend_of, device_of, device_type

    kind = device_type(config)
    if kind == "cuda":
        torch.cuda.set_device(device_of(kind, int(os.environ["LOCAL_RANK"])))
    if store is None:
        yield
        return
    backend = backend_of(kind)
    if backend == "gloo":
        _check_interface()
    torch.distributed.init_process_group(
        backend,
        timeout=timedelta(seconds=config.launcher.message_timeout_seconds),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield
    # Only after success: after an error the peers may have ended, and destroying the group could wait for them.
    torch.distributed.destroy_process_group()


def uses_cuda(config: RunConfig) -> bool:
    """Whether the tensors of this run are on CUDA devices."""
    from runner.model.device import device_type

    return device_type(config) == "cuda"


def run(config_file: Path, run_dir: Path, entry: str = TRAIN_ENTRY) -> NoReturn:
    """Run a rank that this machine's supervisor has started, and end the process."""
    die_with_parent()
    ignore_preemption()  # the parent decides, and sends SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no terminal reaches this process; Lightning would exit with 1
    faulthandler.enable()
    Pulse.begin()
    leave(main(config_file, run_dir, entry))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
