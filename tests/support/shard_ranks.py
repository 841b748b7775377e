"""Ranks that divide layers, as threads of one process, which take turns, each with random numbers of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from runner.model.sharded.group import ShardGroup

__all__ = ["Meeting", "RankExchange", "run_sharded"]

Result = TypeVar("Result")


class Meeting:
    """Where the ranks hand one another their tensors. While one of them computes, the others wait."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(degree, timeout=1500)
        self._slots: list[Tensor] = [torch.empty(0)] * degree

    def meet(self, index: int, value: Tensor) -> list[Tensor]:
        """The values of all ranks, in their order."""
        state = torch.get_rng_state()
        self._slots[index] = value.detach()
        self.turn.release()
        try:
            self._barrier.wait()
            met = list(self._slots)
            self._barrier.wait()
        finally:
            self.turn.acquire()
            torch.set_rng_state(state)
        return met

    def abort(self) -> None:
        """Free the ranks that wait for one that has failed."""
        self._barrier.abort()


class RankExchange:
    """What a rank exchanges, in plain sums in the order of the ranks.

    Attributes:
        calls: what was asked, in order.
    """

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self._index = meeting, index
        self.calls: list[str] = []

    def all_reduce(self, value: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return torch.stack(self._meeting.meet(self._index, value)).sum(0)

    def all_reduce_max(self, value: Tensor) -> Tensor:
        self.calls.append("all_reduce_max")
        return torch.stack(self._meeting.meet(self._index, value)).amax(0)

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        self.calls.append("all_gather")
        return torch.cat(self._meeting.meet(self._index, value), dim)

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        self.calls.append("reduce_scatter")
        whole = torch.stack(self._meeting.meet(self._index, value)).sum(0)
        return whole.chunk(self._meeting.degree, dim)[self._index].contiguous()


def run_sharded(degree: int, rank: Callable[[ShardGroup, RankExchange], Result]) -> list[Result]:
    """What a function gives on each of ``degree`` ranks. All of them start with the present random state."""
    meeting, state = Meeting(degree), torch.get_rng_state()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work(index: int) -> None:
        with meeting.turn:
            torch.set_rng_state(state)
            group = ShardGroup(degree, index)
            group.exchange = exchange = RankExchange(meeting, index)
            try:
                results[index] = rank(group, exchange)
            except BaseException as error:
                errors.append(error)
                meeting.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (broken or errors)[0]
    return [results[index] for index in range(degree)]
