"""What a plan must know of the machines of a run, gathered before it is made: the smallest one decides."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.config.units import format_bytes

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

__all__ = ["MachineFacts", "smallest_machine", "this_machine"]

logger = logging.getLogger(__name__)

_KEY = "runner/machine"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a plan takes from the machine on which its ranks run.

    Args:
        memory_bytes: the memory that its ranks share.
        device_memory_bytes: a rank's share of the memory of its accelerator; None if the run uses none.
        cores: the cores that a rank may use.
    """

    memory_bytes: int
    device_memory_bytes: int | None
    cores: int


def this_machine(config: RunConfig) -> MachineFacts:
    """The facts of the machine on which this process runs."""
    from runner.model.device import device_memory_bytes
    from runner.plan.cores import num_cores
    from runner.plan.memory import limits

    return MachineFacts(limits.machine_memory_bytes(), device_memory_bytes(config), num_cores())


def smallest_machine(
    config: RunConfig, store: Store | None, rank: int, world_size: int, patience: timedelta
) -> MachineFacts:
    """The least of each fact over the machines of all ranks; every rank must call it.

    Args:
        config: the request.
        store: the key-value store of the run; None if this rank is alone.
        rank, world_size: the rank of this process, and the number of ranks.
        patience: how long rank 0 waits for the others.

    Returns:
        on rank 0, which plans, the least of each; on the others the facts of their own machine.
    """
    own = this_machine(config)
    if store is None:
        return own
    store.set(f"{_KEY}/{rank}", json.dumps(asdict(own)))
    if rank > 0:
        return own
    keys = [f"{_KEY}/{one}" for one in range(world_size)]
    store.wait(keys, patience)
    found = [MachineFacts(**json.loads(store.get(key))) for key in keys]
    devices = [one.device_memory_bytes for one in found if one.device_memory_bytes is not None]
    least = MachineFacts(
        min(one.memory_bytes for one in found), min(devices, default=None), min(one.cores for one in found)
    )
    for what in ("memory_bytes", "device_memory_bytes"):
        here, there = getattr(own, what), getattr(least, what)
        if there != here:
            logger.info(
                "planned for the smallest machine, whose memory is %s, here %s", *map(format_bytes, (there, here))
            )
    return least
