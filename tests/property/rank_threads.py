"""Runs every rank of a training run in one process, a thread each, through the rank's own entry.

A rank is a process: it has random generators, an environment and a place in ``torch.distributed`` of its own. Here one
thread runs at a time, until it waits for another one; what belongs to a process goes with it. So a run depends
on nothing but its request, and no thread needs a lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from runner.engine.transport.alone import AloneTransport
from runner.engine.transport.base import Channel, Handle, Transport
from runner.engine.transport.threads import AbortedError, ThreadHub, ThreadTransport
from runner.model.seeds import keep_generators
from runner.plan.values import RunPlan
from runner.strategy.collectives import CollectiveStrategy

Result = TypeVar("Result")


class _Rank(threading.local):
    """What the present thread is."""

    transport: ThreadTransport | None = None
    environment: Mapping[str, str] = {}


_HERE = _Rank()


class DeadlockError(RuntimeError):
    """All ranks wait for one another."""


class _Hub(ThreadHub):
    """Mailboxes under one lock, which the thread that runs holds."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.condition = threading.Condition(threading.RLock())
        self.running = world_size
        self._waiting: dict[int, Callable[[], bool]] = {}

    def wait_for(self, ready: Callable[[], bool]) -> None:
        if self.aborted or ready():
            super().wait_for(ready)
            return
        own = threading.get_ident()
        restore = keep_generators()  # another rank draws meanwhile
        self._waiting[own] = ready
        try:
            self.look_for_deadlock()
            super().wait_for(ready)
        finally:
            del self._waiting[own]
            restore()

    def look_for_deadlock(self) -> None:
        """Abort if no rank can ever go on."""
        if (
            not self.aborted
            and len(self._waiting) == self.running > 0
            and not any(ready() for ready in self._waiting.values())
        ):
            self.abort()
            raise DeadlockError(f"all {self.running} ranks wait for one another")


class _Arrival:
    """A receive that tells whether its message is there; those of one way arrive in the order of their posting."""

    def __init__(self, handle: Handle, way: deque[_Arrival], box: Sequence[Tensor]) -> None:
        self._handle, self._way, self._box = handle, way, box
        self._has_come = False
        way.append(self)

    def wait(self) -> None:
        while not self._has_come:
            first = self._way.popleft()
            first._handle.wait()
            first._has_come = True

    def is_completed(self) -> bool:
        return self._has_come or self._way.index(self) < len(self._box)


class _Transport(ThreadTransport):
    hub: _Hub

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self._ways: dict[tuple[int, Channel], deque[_Arrival]] = defaultdict(deque)

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        handle = super().receive(buffer, peer, channel)
        return _Arrival(handle, self._ways[peer, channel], self.hub.mail[peer, self.rank, channel])

    def wait_for_any(self, messages: Sequence[Sequence[Handle]]) -> None:
        """Wait until all parts of one of the messages are there, as a watched transport does in a thread."""
        with self.hub.condition:
            self.hub.wait_for(lambda: any(all(part.is_completed() for part in message) for message in messages))

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield  # a thread runs alone, until it waits


class _Environment(dict[str, str]):
    """The process's environment, with the variables of the rank that asks."""

    def __getitem__(self, key: str) -> str:
        own = _HERE.environment
        return own[key] if key in own else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in _HERE.environment or super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        own = _HERE.environment
        return own[key] if key in own else super().get(key, default)


class _Distributed:
    """What the runner uses of ``torch.distributed``, for the rank that calls."""

    ReduceOp = dist.ReduceOp

    @property
    def _own(self) -> ThreadTransport:
        assert _HERE.transport is not None
        return _HERE.transport

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self._own.hub.world_size))

    def is_initialized(self) -> bool:
        return _HERE.transport is not None

    def get_rank(self) -> int:
        return self._own.rank

    def get_world_size(self) -> int:
        return self._own.hub.world_size

    def get_backend(self) -> str:
        return "gloo"

    def barrier(self) -> None:
        self._gathered(torch.zeros(1))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        sent = self._own.start_all_gather(tensor, self._everyone).wait()[src]
        if self._own.rank != src:
            tensor.copy_(sent)

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        for part, sent in zip(parts, self._gathered(tensor), strict=True):
            part.copy_(sent)

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, dst: int) -> None:
        found = self._gathered(tensor)
        for part, sent in zip(parts or (), found if parts is not None else (), strict=True):
            part.copy_(sent)

    def all_reduce(self, tensor: Tensor) -> None:
        self._own.all_reduce(tensor, self._everyone).wait()

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        return self._own.start_all_gather(tensor, self._everyone).wait()


def _transport_of(plan: RunPlan, ties: object, options: object, device: torch.device, **limits: float) -> Transport:
    return AloneTransport(device) if _HERE.transport is None else _HERE.transport


@contextlib.contextmanager
def _as_processes() -> Iterator[None]:
    """Within it, what belongs to a process belongs to a thread."""
    fake = _Distributed()
    with contextlib.ExitStack() as held:
        for module in ("engine.transport.objects", "strategy.collectives", "strategy.pipeline"):
            held.enter_context(mock.patch(f"runner.{module}.dist", fake))
        held.enter_context(mock.patch("runner.strategy.pipeline.make_transport", _transport_of))
        held.enter_context(mock.patch("runner.engine.engine.WatchedTransport", lambda transport: transport))
        held.enter_context(mock.patch.object(CollectiveStrategy, "_set_timeout"))
        held.enter_context(mock.patch.object(os, "environ", _Environment(os.environ)))
        yield


def run_ranks(world_size: int, function: Callable[[int], Result]) -> list[Result]:
    """Run ``function`` as every rank, and return the results by rank.

    Raises:
        BaseException: the first failure that is not merely another rank's abort.
        RuntimeError: a message was sent and never received.
    """
    hub = _Hub(world_size)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        _HERE.transport = _Transport(hub, rank) if world_size > 1 else None
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        named = {key: str(value) for key, value in local.items()} | {"GROUP_RANK": "0"}
        _HERE.environment = named if world_size > 1 else {}
        with hub.condition:
            try:
                try:
                    results[rank] = function(rank)
                finally:
                    hub.running -= 1
                hub.look_for_deadlock()
            except BaseException as error:  # raised in the caller's thread
                failures.append(error)
                hub.abort()

    with _as_processes():
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
