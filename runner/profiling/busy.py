"""Measures which share of a core other work takes."""

from __future__ import annotations

import time

__all__ = ["Probes", "busy_share"]

_SPIN_SECONDS = 0.003
_PROBES = 16


class Probes:
    """Short spins of this thread: what is missing of their time, other work had.

    Unlike the times of a layer, they wait for nothing else, such as a disk or a GPU.
    """

    def __init__(self) -> None:
        self._used = self._passed = 0.0

    def probe(self) -> None:
        """Spin once, until this thread has computed for some milliseconds."""
        used, start = time.thread_time(), time.perf_counter()
        while time.thread_time() - used < _SPIN_SECONDS:
            pass
        self._used += time.thread_time() - used
        self._passed += time.perf_counter() - start

    @property
    def share(self) -> float:
        """The share of a core that other work had, from 0 to 1."""
        return min(1.0, max(0.0, 1.0 - self._used / self._passed)) if self._passed else 0.0


def busy_share() -> float:
    """The share now; it takes about 50 ms."""
    probes = Probes()
    for _ in range(_PROBES):
        probes.probe()
    return probes.share
