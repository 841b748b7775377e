"""Copies between a device and its host's memory while the device computes: a lane in each direction.

A lane carries one load after the other. On a CPU a thread copies, on CUDA a stream. For experiments a lane may be made
slower: a load then counts as arrived only when a slower link would have carried it, by the rule that
:mod:`runner.schedule.simulation.host_link` plays.

What a load copies is held until its owner waits for it or uses it, and not until another thread has copied it: memory
is freed by the thread that runs the layers, at places that do not depend on how fast the copies are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

__all__ = ["Lane", "Load", "Pair", "SlowLink", "make_lane"]


class Pair(NamedTuple):
    """Two storages of equal size; the first is copied to the second."""

    source: torch.UntypedStorage
    target: torch.UntypedStorage


class Load(ABC):
    """Storages that one lane carries together.

    Args:
        pairs: what is copied; both sides are held until the load has ended.
        due: the moment, on ``time.perf_counter``, before which it does not count as arrived.
        check: called once when everything is copied; it may raise.
    """

    def __init__(self, pairs: Sequence[Pair], due: float, check: Callable[[], None] | None) -> None:
        self.due = due
        self._pairs, self._check = tuple(pairs), check

    def wait(self) -> None:
        """Wait until everything is copied; then the storages are no longer held."""
        self._wait()
        self._end()

    def use(self) -> None:
        """Let the device's next work see the copies: a CPU waits for them here, a GPU's stream waits by itself."""
        self._order()
        self._end()

    def _end(self) -> None:
        left = self.due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        check, self._pairs, self._check = self._check, (), None
        if check is not None:
            check()

    @abstractmethod
    def _wait(self) -> None: ...

    def _order(self) -> None:
        self._wait()


class SlowLink:
    """The link by which an experiment slows one lane down.

    Args:
        delay_seconds: seconds that every load takes besides those of its bytes.
        bytes_per_second: its speed; None: it is not limited.
    """

    def __init__(self, delay_seconds: float = 0.0, bytes_per_second: float | None = None) -> None:
        self._delay, self._speed = delay_seconds, bytes_per_second
        self._free = 0.0

    def due(self, num_bytes: int, not_before: float = 0.0) -> float:
        """The moment when a load that is sent now arrives; 0 if the link is not slow.

        Args:
            num_bytes: the bytes of the load.
            not_before: the moment when another lane has carried what is sent.
        """
        if not self._delay and not self._speed:
            return 0.0
        length = self._delay + (num_bytes / self._speed if self._speed else 0.0)
        self._free = max(self._free, time.perf_counter(), not_before) + length
        return self._free


class Lane(ABC):
    """Carries loads in one direction.

    Args:
        slow: the link that slows it down.
    """

    def __init__(self, slow: SlowLink) -> None:
        self._slow = slow

    def carry(self, pairs: Sequence[Pair], after: Load | None = None, check: Callable[[], None] | None = None) -> Load:
        """Begin to copy, after earlier loads.

        Args:
            pairs, check: see :class:`Load`.
            after: a load that a lane in the other direction must have carried before.
        """
        num_bytes = sum(pair.source.nbytes() for pair in pairs)
        return self._begin(pairs, self._slow.due(num_bytes, after.due if after is not None else 0.0), after, check)

    @abstractmethod
    def _begin(
        self, pairs: Sequence[Pair], due: float, after: Load | None, check: Callable[[], None] | None
    ) -> Load: ...


def make_lane(device: torch.device, slow: SlowLink) -> Lane:
    """A lane between a device and its host; each direction needs its own."""
    return _StreamLane(device, slow) if device.type == "cuda" else _ThreadLane(slow)


class _ThreadLane(Lane):
    def __init__(self, slow: SlowLink) -> None:
        super().__init__(slow)
        self._thread = ThreadPoolExecutor(1, "host link")

    def _begin(self, pairs: Sequence[Pair], due: float, after: Load | None, check: Callable[[], None] | None) -> Load:
        load = _ThreadLoad(pairs, due, check)
        load.copied = self._thread.submit(load.copy, after.copied if isinstance(after, _ThreadLoad) else None)
        return load


class _ThreadLoad(Load):
    copied: Future[None]

    def copy(self, after: Future[None] | None) -> None:
        """Copy, in the lane's thread."""
        if after is not None:
            after.result()
        for source, target in self._pairs:
            if "meta" not in (source.device.type, target.device.type):  # the storage of a fake tensor has no content
                target.copy_(source)

    def _wait(self) -> None:
        self.copied.result()


class _StreamLane(Lane):
    def __init__(self, device: torch.device, slow: SlowLink) -> None:
        super().__init__(slow)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _begin(self, pairs: Sequence[Pair], due: float, after: Load | None, check: Callable[[], None] | None) -> Load:
        self._stream.wait_stream(torch.cuda.current_stream())  # it has made the sources, and may still use the targets
        if isinstance(after, _StreamLoad):
            self._stream.wait_event(after.copied)
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return _StreamLoad(pairs, due, check, self._stream.record_event())


class _StreamLoad(Load):
    def __init__(self, pairs: Sequence[Pair], due: float, check: Callable[[], None] | None, copied: Any) -> None:
        super().__init__(pairs, due, check)
        self.copied = copied

    def _wait(self) -> None:
        self.copied.synchronize()

    def _order(self) -> None:
        torch.cuda.current_stream().wait_event(self.copied)
