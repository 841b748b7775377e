"""Ranks that share the cores of this machine: how many compute at once, and a note about it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.config.units import format_seconds
from runner.plan.memory.limits import ranks_of_a_node
from runner.plan.values import TimePrediction

__all__ = ["SharedCores", "core_note", "num_cores", "shared_cores"]

_CROWD = 4  # times the cores


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Cores that are fewer than the threads of the ranks on them.

    Args:
        cores: number of cores.
        ranks: number of ranks.
        threads: number of threads of a rank.
    """

    cores: int
    ranks: int
    threads: int

    def at_once(self, replicas: int) -> float:
        """How many ranks of each replica's pipeline can compute at full speed at the same time."""
        return self.cores / (self.threads * replicas)


def shared_cores(config: RunConfig, cores: int | None, *, accelerated: bool) -> SharedCores | None:
    """The cores that a request's ranks share; None if each has its own, or this machine is not the one that is planned.

    Args:
        config: the request.
        cores: cores of this machine; None: as many as the ranks need.
        accelerated: whether the ranks compute on an accelerator.
    """
    ranks, threads = ranks_of_a_node(config), config.trainer.threads
    here = config.hardware.name == "auto" and config.launcher.name == "local" and not accelerated
    if cores is None or not here or ranks == 1 or ranks * threads <= cores:
        return None
    return SharedCores(cores, ranks, threads)


def core_note(shared: SharedCores, time: TimePrediction) -> str:
    """A note that ranks share cores, with the step that they would have without that."""
    who = f"{shared.ranks} ranks" + (f" of {shared.threads} threads each" if shared.threads > 1 else "")
    cores = f"{shared.cores} core{'s' if shared.cores != 1 else ''}"
    is_crowd = shared.ranks * shared.threads >= _CROWD * shared.cores
    start = f"; {shared.ranks} processes on {cores} may take minutes to start" if is_crowd else ""
    if not time.alone_seconds:
        return f"{who} share {cores}; a run measures what that costs{start}"
    alone = format_seconds(time.alone_seconds)
    counts = f"which the predicted step counts: with a core for each thread it would be {alone}"
    return f"{who} share {cores}, {counts}{start}"
