"""Ranks that divide a layer's weights, as threads of this process that sum in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.sharded.group import ShardGroup

Result = TypeVar("Result")


class RankOrder:
    """What the ranks of a group do together, and ``calls``: the name and the number of elements of each exchange."""

    def __init__(self, transport: ThreadTransport, degree: int) -> None:
        self._transport, self._degree = transport, degree
        self.calls: list[tuple[str, int]] = []

    def _parts(self, name: str, value: Tensor) -> list[Tensor]:
        assert value.is_contiguous()
        self.calls.append((name, value.numel()))
        return self._transport.start_all_gather(value, range(self._degree)).wait()

    def all_reduce(self, value: Tensor) -> Tensor:
        return in_order(self._parts("all_reduce", value))

    def all_reduce_max(self, value: Tensor) -> Tensor:
        return torch.stack(self._parts("all_reduce_max", value)).amax(0)

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        return torch.cat(self._parts("all_gather", value), dim)

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        whole = in_order(self._parts("reduce_scatter", value))
        return whole.chunk(self._degree, dim)[self._transport.rank].contiguous()


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run_shards(degree: int, function: Callable[[ShardGroup, RankOrder], Result]) -> list[Result]:
    """Run ``function`` as every rank of a group of ``degree``; return the results by rank."""

    def rank(transport: ThreadTransport) -> Result:
        group, exchange = ShardGroup(degree, transport.rank), RankOrder(transport, degree)
        group.exchange = exchange
        return function(group, exchange)

    return run_ranks(degree, rank)
