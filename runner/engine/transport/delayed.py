"""Simulates a slower link, for experiments: messages leave when they would have arrived."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from runner.engine.transport.background import BackgroundThread
from runner.engine.transport.base import Channel, Gathering, Handle, Transport, TransportAround

__all__ = ["DelayedTransport"]


class DelayedTransport(TransportAround):
    """Wraps another transport so that messages, sums and gatherings take longer; blocking gatherings are not delayed.

    Messages to one peer share a link: each occupies it, after earlier messages, for a time in proportion to its length,
    and then takes the delay. A thread for each peer waits; the rank does not. A sum or gathering occupies the link to
    the group's next rank with all that a ring of R ranks sends, and takes the delay 2 (R - 1) or R - 1 times; the
    slowest link of the ring is that of all.

    Args:
        inner: the transport that sends the messages.
        delay_seconds: the delay from one end of a link to the other.
        bytes_per_second: the speed of a link in one direction; None: it is not limited.
        between: both of these for the link from one rank to another; None: all links are alike.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        delay_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        between: Callable[[int, int], tuple[float, float | None]] | None = None,
    ) -> None:
        super().__init__(inner)
        self._between = between or (lambda rank, peer: (delay_seconds, bytes_per_second))
        self._free_at: dict[int, float] = defaultdict(float)
        self._links: dict[int, BackgroundThread[_Departure]] = {}

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        delay, speed = self._between(self.rank, peer)
        length = tensor.numel() * tensor.element_size() / speed if speed else 0.0
        self._free_at[peer] = max(self._free_at[peer], time.perf_counter()) + length
        departure = _Departure(tensor, channel, self._free_at[peer] + delay)
        if peer not in self._links:
            self._links[peer] = BackgroundThread(partial(self._carry, peer), f"link to rank {peer}")
        self._links[peer].put(departure)
        return departure

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        messages = 2 * (len(group) - 1)
        due = self._around(group, messages * tensor.nbytes / len(group), messages)
        return _Late(self._inner.all_reduce(tensor, group), due)

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        messages = len(group) - 1
        due = self._around(group, messages * tensor.nbytes, messages)
        return _LateParts(self._inner.start_all_gather(tensor, group), due)

    def _around(self, group: Sequence[int], num_bytes: float, messages: int) -> float:
        """Occupy the link to the next rank of a ring; the moment at which its messages have all arrived."""
        following = group[(group.index(self.rank) + 1) % len(group)]
        links = [self._between(*pair) for pair in pairwise((*group, group[0])) if len(group) > 1]
        length = num_bytes * max((1 / speed for _, speed in links if speed), default=0.0)
        self._free_at[following] = max(self._free_at[following], time.perf_counter()) + length
        return self._free_at[following] + messages * max((delay for delay, _ in links), default=0.0)

    def _carry(self, peer: int, departure: _Departure) -> None:
        time.sleep(max(0.0, departure.due - time.perf_counter()))
        try:
            departure.left(self._inner.send(departure.tensor, peer, departure.channel))
        except Exception as error:  # ``wait`` raises it
            departure.failed(error)


class _Late:
    """A :class:`Handle` that has not completed before its moment."""

    def __init__(self, handle: Handle, due: float) -> None:
        self._handle, self._due = handle, due

    def wait(self) -> None:
        self._handle.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due and self._handle.is_completed()


class _LateParts:
    """A :class:`Gathering` that has not ended before its moment."""

    def __init__(self, gathering: Gathering, due: float) -> None:
        self._gathering, self._due = gathering, due

    def wait(self) -> list[Tensor]:
        parts = self._gathering.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return parts


class _Departure:
    """A :class:`Handle`: a message that waits for its time, then for its transfer."""

    def __init__(self, tensor: Tensor, channel: Channel, due: float) -> None:
        self.tensor, self.channel, self.due = tensor, channel, due
        self._on_its_way = threading.Event()
        self._handle: Handle | None = None
        self._error: Exception | None = None

    def left(self, handle: Handle) -> None:
        self._handle = handle
        self._on_its_way.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._on_its_way.set()

    def wait(self) -> None:
        self._on_its_way.wait()
        if self._handle is None:
            raise RuntimeError("a delayed message could not be sent") from self._error
        self._handle.wait()

    def is_completed(self) -> bool:
        return self._handle is not None and self._handle.is_completed()
