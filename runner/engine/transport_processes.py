"""Ranks as processes, over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Gloo tells channels apart by tags. NCCL has no tags, so that each channel gets a communicator of its own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from runner.engine.transport import Channel, Gathering, Handle, Transport

__all__ = ["ProcessTransport"]


class ProcessTransport(Transport):
    """This process's rank. Every rank constructs it with the same groups in the same order (a collective).

    Args:
        device: where messages live.
        groups: the groups that reductions will name; a group of one needs no communicator.
    """

    def __init__(self, device: torch.device, groups: Iterable[Sequence[int]]) -> None:
        self.rank = dist.get_rank()
        self.device = device
        self._tagged = dist.get_backend() == "gloo"
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in groups:
            ranks = tuple(group)
            if len(ranks) > 1 and ranks not in self._groups:
                made = dist.new_group(list(ranks))
                if self.rank in ranks:
                    self._groups[ranks] = made
        self._channels = {} if self._tagged else {channel: dist.new_group() for channel in Channel}

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        return _checked(dist.isend(tensor, peer, self._channels.get(channel), int(channel) if self._tagged else 0))

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        return _checked(dist.irecv(buffer, peer, self._channels.get(channel), int(channel) if self._tagged else 0))

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        return _checked(dist.all_reduce(tensor, group=self._groups[tuple(group)], async_op=True))

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        parts = [torch.empty_like(tensor) for _ in group]
        return _Gathering(_checked(dist.all_gather(parts, tensor, self._groups[tuple(group)], async_op=True)), parts)


@dataclass(frozen=True)
class _Gathering:
    handle: Handle
    parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.handle.wait()
        return self.parts


def _checked(work: dist.Work | None) -> Handle:
    if work is None:
        raise RuntimeError("this process is not part of the process group it communicates in")
    return work
