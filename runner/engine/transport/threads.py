"""The transport between ranks that are threads of one process, for tests and small checks.

Messages are copied into mailboxes. A rank that fails aborts the others, which would otherwise wait forever.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runner.engine.transport.base import Channel, Gathering, Handle, Transport

__all__ = ["AbortedError", "ThreadHub", "ThreadTransport", "run_ranks"]

Result = TypeVar("Result")


class AbortedError(RuntimeError):
    """Raised in a rank that waits for another one which has failed."""


class ThreadHub:
    """The mailboxes and meeting points that the ranks of one process share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.condition = threading.Condition()
        self.mail: dict[tuple[int, int, Channel], deque[Tensor]] = defaultdict(deque)
        self.meetings: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = defaultdict(dict)
        self.left: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self.aborted = False
        self.compute = threading.Lock()

    def abort(self) -> None:
        with self.condition:
            self.aborted = True
            self.condition.notify_all()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Block until ``ready()``; the condition must be held.

        Raises:
            AbortedError: a rank failed meanwhile.
        """
        self.condition.wait_for(lambda: self.aborted or ready())
        if self.aborted:
            raise AbortedError("another rank failed")

    def num_undelivered(self) -> int:
        """The number of messages that were sent but never received; zero after a run without errors."""
        return sum(len(box) for box in self.mail.values())


def _on_the_wire(tensor: Tensor) -> Tensor:
    """A copy for a message on its way; it is not counted as memory of any rank."""
    with _disable_current_modes():
        return tensor.detach().clone()


class _Done:
    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class _Receive:
    def __init__(self, hub: ThreadHub, key: tuple[int, int, Channel], buffer: Tensor) -> None:
        self._hub, self._key, self._buffer = hub, key, buffer

    def wait(self) -> None:
        with self._hub.condition:
            box = self._hub.mail[self._key]
            self._hub.wait_for(lambda: bool(box))
            message = box.popleft()
        self._buffer.copy_(message)

    def is_completed(self) -> bool:
        return bool(self._hub.mail[self._key])


class _Gather:
    def __init__(self, transport: ThreadTransport, tensor: Tensor, group: tuple[int, ...]) -> None:
        self._transport = transport
        self._key = transport.enter(tensor, group)

    def wait(self) -> list[Tensor]:
        return [part.clone() for part in self._transport.meet(self._key)]


class _Reduce:
    def __init__(self, transport: ThreadTransport, tensor: Tensor, group: tuple[int, ...]) -> None:
        self._transport, self._tensor = transport, tensor
        self._key = transport.enter(tensor, group)

    def wait(self) -> None:
        parts = self._transport.meet(self._key)
        self._tensor.copy_(parts[0])
        for part in parts[1:]:
            self._tensor.add_(part)

    def is_completed(self) -> bool:
        return False


class ThreadTransport(Transport):
    """One thread's view of a :class:`ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.device = torch.device("cpu")
        self._sequence: dict[tuple[int, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        with self.hub.condition:
            self.hub.mail[self.rank, peer, channel].append(_on_the_wire(tensor))
            self.hub.condition.notify_all()
        return _Done()

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        return _Receive(self.hub, (peer, self.rank, channel), buffer)

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        return _Reduce(self, tensor, tuple(group))

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        return _Gather(self, tensor, tuple(group))

    def exclusive(self) -> AbstractContextManager[object]:
        return self.hub.compute

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See :meth:`Transport.aside`; the generator, which the ranks share, is then as it was."""
        state = torch.get_rng_state()
        self.hub.compute.release()
        try:
            yield
        finally:
            self.hub.compute.acquire()
            torch.set_rng_state(state)

    def enter(self, tensor: Tensor, group: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Put a copy of ``tensor`` into the group's next meeting; return the key of the meeting."""
        key = group, self._sequence[group]
        self._sequence[group] += 1
        with self.hub.condition:
            self.hub.meetings[key][self.rank] = _on_the_wire(tensor)
            self.hub.condition.notify_all()
        return key

    def meet(self, key: tuple[tuple[int, ...], int]) -> list[Tensor]:
        """Wait until the whole group has entered; return its tensors in the group's order."""
        group = key[0]
        with self.hub.condition:
            meeting = self.hub.meetings[key]
            self.hub.wait_for(lambda: len(meeting) == len(group))
            parts = [meeting[rank] for rank in group]
            self.hub.left[key] += 1
            if self.hub.left[key] == len(group):
                del self.hub.meetings[key], self.hub.left[key]
        return parts


def run_ranks(world_size: int, function: Callable[[ThreadTransport], Result]) -> list[Result]:
    """Run ``function`` as every rank, each in its own thread; return the results by rank.

    Raises:
        BaseException: the first failure that is not merely another rank's abort.
    """
    hub = ThreadHub(world_size)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(hub, rank))
        except BaseException as error:  # raised in the caller's thread
            failures.append(error)
            hub.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, AbortedError)), failures[0])
    if hub.num_undelivered():
        raise RuntimeError(f"{hub.num_undelivered()} messages were sent and never received")
    return [results[rank] for rank in range(world_size)]
