"""Determines the device on which a run's tensors are."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.plan.memory.limits import ranks_of_a_node

if TYPE_CHECKING:
    import torch

__all__ = ["backend_of", "device_is_here", "device_memory_bytes", "device_of", "device_type", "ranks_of_a_device"]


def device_type(config: RunConfig) -> str:
    """``cpu`` or ``cuda``; ``device=auto`` takes CUDA if it is available."""
    if config.device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def device_is_here(config: RunConfig) -> bool:
    """Whether this machine has the device of the run; a machine that only plans or submits may not have it."""
    if device_type(config) != "cuda":
        return True
    import torch

    return torch.cuda.is_available()


def device_memory_bytes(config: RunConfig) -> int | None:
    """A rank's share of the memory of this machine's first accelerator.

    None if the run does not use one or there is none here.
    """
    if device_type(config) != "cuda" or not device_is_here(config):
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) // ranks_of_a_device(config)


def ranks_of_a_device(config: RunConfig) -> int:
    """The most ranks of a run that share one accelerator of this machine, which has one."""
    import torch

    return math.ceil(ranks_of_a_node(config) / torch.cuda.device_count())


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank; where a machine has fewer accelerators than ranks, they take turns.

    Args:
        kind: ``cpu`` or ``cuda``.
        local_rank: number of the rank on its machine.
    """
    import torch

    return torch.device("cuda", local_rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


def backend_of(kind: str) -> str:
    """The backend of this process's group: NCCL needs an accelerator for each rank, Gloo none.

    Args:
        kind: ``cpu`` or ``cuda``.
    """
    import torch

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if kind == "cuda" and local_ranks <= torch.cuda.device_count() else "gloo"
