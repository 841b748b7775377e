"""The transport of a run that is played on tensors without memory, its ranks threads of which one runs at a time.

What a message holds is not there, so that only its arrival is played. Values that steer a run (sizes, steps) are real
and are copied. The ranks of one pipeline play; every other rank is taken to do and to send what these do.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from runner.engine.transport.base import Channel, Gathering, Handle, Transport

__all__ = ["PretendedTransport", "play_ranks"]

Result = TypeVar("Result")


_Meeting = tuple[tuple[int, ...], int]


class _OtherFailedError(RuntimeError):
    """Raised in a rank that waits, when another one has failed."""


class _Stage:
    """What the playing ranks share; the thread that runs holds ``turn``."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self.turn = threading.Condition(threading.RLock())
        self.mail: dict[tuple[int, int, Channel], deque[Tensor | None]] = defaultdict(deque)
        self.texts: dict[tuple[int, int, Channel], deque[bytes]] = defaultdict(deque)
        self.meetings: dict[_Meeting, dict[int, Tensor]] = defaultdict(dict)
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running = len(self.ranks)
        self._failed = False

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Let other ranks run until ``ready()``.

        Raises:
            RuntimeError: another rank has failed, or all wait for one another.
        """
        own = threading.get_ident()
        self._waiting[own] = ready
        try:
            self._require_progress()
            self.turn.wait_for(lambda: self._failed or ready())
        finally:
            del self._waiting[own]
        if self._failed:
            raise _OtherFailedError

    def end(self, *, failed: bool) -> None:
        """Say that one rank has ended."""
        self._running -= 1
        self._failed |= failed
        if not failed:
            self._require_progress()
        self.turn.notify_all()

    def _require_progress(self) -> None:
        stuck = len(self._waiting) == self._running > 0 and not any(ready() for ready in self._waiting.values())
        if stuck and not self._failed:
            self._failed = True
            self.turn.notify_all()
            raise RuntimeError("all ranks wait for one another")


class PretendedTransport(Transport):
    """One rank's view of the messages."""

    def __init__(self, stage: _Stage, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self._stage = stage
        self._meetings: dict[tuple[int, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Handle:
        if peer in self._stage.ranks:
            self._stage.mail[self.rank, peer, channel].append(_on_the_way(tensor))
            self._stage.turn.notify_all()
        return _DONE

    def receive(self, buffer: Tensor, peer: int, channel: Channel) -> Handle:
        return _Receive(self._stage, (peer, self.rank, channel), buffer) if peer in self._stage.ranks else _DONE

    def send_bytes(self, data: bytes, peer: int, channel: Channel) -> list[tuple[Handle, Tensor]]:
        if peer in self._stage.ranks:
            self._stage.texts[self.rank, peer, channel].append(data)
            self._stage.turn.notify_all()
        return []

    def receive_bytes(self, peer: int, channel: Channel) -> bytes:
        box = self._stage.texts[peer, self.rank, channel]
        self._stage.wait_for(lambda: bool(box))
        return box.popleft()

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> Handle:
        playing = tuple(sorted(self._stage.ranks.intersection(group)))
        if isinstance(tensor, FakeTensor) or len(playing) == 1:
            return _DONE
        key = playing, self._meetings[playing]
        self._meetings[playing] += 1
        return _Sum(self._stage, key, self.rank, tensor)

    def start_all_gather(self, tensor: Tensor, group: Sequence[int]) -> Gathering:
        return _Gathered(tensor, len(group))


class _Done:
    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


_DONE = _Done()


class _Gathered:
    """A gathering in which all have the same tensor."""

    def __init__(self, tensor: Tensor, count: int) -> None:
        self._tensor, self._count = tensor, count

    def wait(self) -> list[Tensor]:
        return [self._tensor.clone() for _ in range(self._count)]


class _Sum:
    """A sum over the playing ranks of a group, of values that steer; the others are taken to have zeros."""

    def __init__(self, stage: _Stage, meeting: _Meeting, rank: int, tensor: Tensor) -> None:
        self._stage, self._ranks, self._tensor = stage, meeting[0], tensor
        self._parts = stage.meetings[meeting]
        with _disable_current_modes():
            self._parts[rank] = tensor.clone()
        stage.turn.notify_all()

    def wait(self) -> None:
        self._stage.wait_for(self.is_completed)
        with _disable_current_modes():
            self._tensor.copy_(torch.stack([self._parts[rank] for rank in self._ranks]).sum(0))

    def is_completed(self) -> bool:
        return len(self._parts) == len(self._ranks)


class _Receive:
    def __init__(self, stage: _Stage, way: tuple[int, int, Channel], buffer: Tensor) -> None:
        self._stage, self._way, self._buffer = stage, way, buffer

    def wait(self) -> None:
        box = self._stage.mail[self._way]
        self._stage.wait_for(lambda: bool(box))
        message = box.popleft()
        if message is not None and not isinstance(self._buffer, FakeTensor):
            with _disable_current_modes():
                self._buffer.copy_(message)

    def is_completed(self) -> bool:
        return bool(self._stage.mail[self._way])


def _on_the_way(tensor: Tensor) -> Tensor | None:
    """A copy that no rank's memory has; of a tensor without memory nothing but that it comes."""
    if isinstance(tensor, FakeTensor):
        return None
    with _disable_current_modes():
        return tensor.detach().clone()


def play_ranks(ranks: Sequence[int], play: Callable[[PretendedTransport], Result]) -> list[Result]:
    """Call ``play`` as each of the ranks, each in a thread; return the results in the ranks' order.

    Raises:
        BaseException: the first failure of a rank.
    """
    stage = _Stage(ranks)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        with stage.turn:
            try:
                results[rank] = play(PretendedTransport(stage, rank))
                stage.end(failed=False)
            except _OtherFailedError:
                stage.end(failed=True)
            except BaseException as error:  # raised in the caller's thread
                failures.append(error)
                stage.end(failed=True)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in ranks]
