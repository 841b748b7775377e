"""The transport between processes, over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Gloo separates channels by tags. NCCL has no tags, so there each channel gets its own communicator.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from runner.engine.transport.base import Channel, Gathering, Handle, Transport
from runner.engine.transport.quiet_forks import forks_wait_for_threads

__all__ = ["ProcessTransport", "destroy_process_groups"]

_open: WeakSet[ProcessTransport] = WeakSet()


class ProcessTransport(Transport):
    """The transport of this process. Every rank must construct it, with the same groups in the same order.

    Args:
        device: the device of the messages' tensors.
        groups: the groups that reductions will name. A group of a single rank, or of all in order, gets no own
            communicator: each has threads, and those of Gloo wake up a hundred times a second.
        timeout_seconds: the longest wait for a message within a communicator that is made here.
    """

    def __init__(self, device: torch.device, groups: Iterable[Sequence[int]], *, timeout_seconds: float) -> None:
        self.rank = dist.get_rank()
        self._tells_completion = dist.get_backend() != "gloo"
        self.device = device
        everybody = _all_ranks()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(everybody.size())): everybody}
        for group in groups:
            ranks = tuple(group)
            if len(ranks) > 1 and ranks not in self._groups:
                made = dist.new_group(list(ranks), timedelta(seconds=timeout_seconds))
                if self.rank in ranks:
                    assert not isinstance(made, int), "a rank of the group gets it"
                    self._groups[ranks] = made
        self._channels = _open_channels(timedelta(seconds=timeout_seconds))
        _open.add(self)
        forks_wait_for_threads()

    def close(self) -> None:
        """Release the process groups; afterwards no message can be sent or received."""
        self._groups.clear()
        self._channels.clear()

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        group, tag = self._channels[channel]
        return group.send([_real(tensor)], peer, tag)

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        group, tag = self._channels[channel]
        return group.recv([_real(buffer)], peer, tag)

    def tells_completion(self, num_bytes: int) -> bool:
        return self._tells_completion

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        return _checked(dist.all_reduce(tensor, group=self._groups[tuple(group)], async_op=True))

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        parts = [torch.empty_like(tensor) for _ in group]
        return _Gathering(_checked(dist.all_gather(parts, tensor, self._groups[tuple(group)], async_op=True)), parts)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> list[Tensor]:
        """Gather over the group's first rank: two messages per rank, while a ring sends each part through all ranks."""
        made = self._groups[tuple(group)]
        parts = torch.empty((len(group), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        listed = list(parts.unbind()) if self.rank == group[0] else None
        dist.gather(tensor, listed, dst=group[0], group=made)
        dist.broadcast(parts, src=group[0], group=made)
        return list(parts.unbind())


def destroy_process_groups() -> None:
    """Destroy all process groups, even if objects still hold transports over them, and wait until their threads end.

    Call it at the end of a script: a thread of Gloo that releases a finished message after the interpreter has ended
    would abort the process.
    """
    for transport in list(_open):
        transport.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group's threads end with its last reference, and strategies and trainers are cycles


@dataclass(frozen=True)
class _Gathering:
    handle: Handle
    parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.handle.wait()
        return self.parts


def _open_channels(timeout: timedelta) -> dict[Channel, tuple[dist.ProcessGroup, int]]:
    """For each channel, a communicator of all ranks, with the same numbers as their global ranks, and the tag."""
    if dist.get_backend() == "gloo":
        return {channel: (_all_ranks(), int(channel)) for channel in Channel}
    made = {channel: dist.new_group(timeout=timeout) for channel in Channel}
    return {channel: (group, 0) for channel, group in made.items() if not isinstance(group, int)}


def _all_ranks() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise RuntimeError("torch.distributed is not initialized")
    return dist.group.WORLD


def _real(tensor: Tensor) -> Tensor:
    """A real view of a tensor: complex numbers are sent as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _checked(work: dist.Work | None) -> Handle:
    if work is None:
        raise RuntimeError("this process is not part of the process group it communicates in")
    return work
