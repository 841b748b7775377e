"""Clocks of a rank's work: the host's, and that of a CUDA device, which runs kernels after the host launched them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "KeyValueStore", "clock_of", "seconds_behind"]

_ROUND_TRIPS = 5


class Clock(Protocol):
    """Tells moments, which are read later.

    Args:
        behind: seconds to add to this machine's ``time.perf_counter`` for that of rank 0: see :func:`seconds_behind`.
    """

    behind: float

    def moment(self) -> Any:
        """Now, in the order of the device's work."""
        ...

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """The moments as seconds of rank 0's ``time.perf_counter``; waits until the device has passed them."""
        ...


class HostClock:
    """The clock of work that is done when its call returns."""

    def __init__(self) -> None:
        self.behind = 0.0

    def moment(self) -> float:
        return time.perf_counter()

    def seconds(self, moments: Sequence[float]) -> list[float]:
        return [moment + self.behind for moment in moments]


class CudaClock:
    """The clock of the current CUDA stream: a moment is an event in it.

    It also tells how long the stream waited for a message, for which the host does not wait. Reading moments waits for
    the stream, once per step: the host then cannot launch the next step's kernels while the last ones run.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
    """

    def __init__(self) -> None:
        self.behind = 0.0

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        if not moments:
            return []
        last = self.moment()
        last.synchronize()
        now = time.perf_counter() + self.behind
        return [now - moment.elapsed_time(last) / 1000 for moment in moments]  # elapsed_time is in milliseconds


def clock_of(device: torch.device) -> Clock:
    """The clock of work on this device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class KeyValueStore(Protocol):
    """What is used of :class:`torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


def seconds_behind(
    store: KeyValueStore | None, rank: int, world_size: int, now: Callable[[], float] = lambda: time.perf_counter()
) -> float:
    """How much later it is by rank 0's clock than by this rank's; 0 if the two may be the same clock.

    All ranks must call it together. Every other rank asks rank 0 for the time, and takes the answer for that of the
    middle between question and answer; of some answers the quickest is used.
    Source: Cristian, Probabilistic clock synchronization, 1989.

    Args:
        store: holds what the ranks tell one another; None: there is one rank.
        rank, world_size: this rank and how many there are.
        now: reads this rank's clock, in seconds.
    """
    if store is None:
        return 0.0
    if rank == 0:
        for asking in range(1, world_size):
            for _ in range(_ROUND_TRIPS):
                _taken(store, f"clock/{asking}/question")
                store.set(f"clock/{asking}/answer", repr(now()))
        return 0.0
    quickest, behind = float("inf"), 0.0
    for _ in range(_ROUND_TRIPS):
        asked = now()
        store.set(f"clock/{rank}/question", "")
        answer = float(_taken(store, f"clock/{rank}/answer"))
        took = now() - asked
        if took < quickest:
            quickest, behind = took, answer - asked - took / 2
    return behind if abs(behind) > quickest / 2 else 0.0


def _taken(store: KeyValueStore, key: str) -> bytes:
    """The value of a key that another rank has set or will set; the key is free again."""
    value = store.get(key)
    store.delete_key(key)
    return value
