"""Chooses the transport for the places of a plan's ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from runner.engine.engine import EngineOptions
from runner.engine.transport.alone import AloneTransport
from runner.engine.transport.base import Transport
from runner.engine.transport.delayed import DelayedTransport
from runner.engine.transport.processes import ProcessTransport
from runner.engine.transport.sockets import SocketTransport
from runner.engine.transport.staged import StagedTransport
from runner.model.tags import holder_groups
from runner.model.ties import Tie
from runner.plan.cut.partition import Partition
from runner.plan.layout.topology import Topology
from runner.strategy.protocols import Layout

__all__ = ["make_transport"]


def make_transport(
    plan: Layout, ties: Sequence[Tie], options: EngineOptions, device: torch.device, *, timeout_seconds: float
) -> Transport:
    """The transport between the ranks of ``plan``, with delay and speed as in ``options``; all ranks must call it.

    Args:
        ties: tied weights of the model; the ranks that hold one form a group of their own.
        timeout_seconds: longest wait for a message.
    """
    topology = plan.topology
    if topology.world_size == 1:
        return AloneTransport(device)
    groups = _groups(topology, ties, plan.partition)
    # Sockets if one launcher started all ranks on this machine and messages are on the host; else a torch backend.
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == topology.world_size
    through_host = device.type == "cpu" or dist.get_backend() == "gloo"
    transport: Transport
    if through_host and on_this_machine:
        transport = SocketTransport(groups, timeout_seconds=timeout_seconds)
    elif through_host:
        transport = ProcessTransport(torch.device("cpu"), groups, timeout_seconds=timeout_seconds)
    else:
        transport = ProcessTransport(device, groups, timeout_seconds=timeout_seconds)
    if through_host and device.type != "cpu":
        transport = StagedTransport(transport, device)
    delay, speed = options.link_delay_seconds, options.link_bytes_per_second
    if not delay and speed is None and options.link_between is None:
        return transport
    return DelayedTransport(transport, delay_seconds=delay, bytes_per_second=speed, between=options.link_between)


def _groups(topology: Topology, ties: Sequence[Tie], partition: Partition) -> list[tuple[int, ...]]:
    """All groups of ranks that exchange anything, the same on every rank."""
    shards, replicas = range(topology.num_shards), range(topology.num_replicas)
    positions = range(topology.num_positions)
    found = [topology.pipeline_group(replica, shard) for replica in replicas for shard in shards]
    found += [topology.data_group(position, shard) for position in positions for shard in shards]
    found += [topology.tensor_group(position, replica) for position in positions for replica in replicas]
    found += [topology.model_group(replica) for replica in replicas]
    found += [topology.peers(position) for position in positions]
    for shard in shards:
        found += holder_groups(ties, partition, partial(topology.holders, shard=shard))
        found += [topology.holders(stage, shard) for stage in range(topology.num_stages)]
    return found
