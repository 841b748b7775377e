"""Clocks of a rank's work: the host's, and that of a CUDA device, which runs kernels after the host launched them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_of"]


class Clock(Protocol):
    """Tells moments, which are read later."""

    def moment(self) -> Any:
        """Now, in the order of the device's work."""
        ...

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """The moments as seconds of ``time.perf_counter``; waits until the device has passed them."""
        ...


class HostClock:
    """The clock of work that is done when its call returns."""

    def moment(self) -> float:
        return time.perf_counter()

    def seconds(self, moments: Sequence[float]) -> list[float]:
        return list(moments)


class CudaClock:
    """The clock of the current CUDA stream: a moment is an event in it.

    It also tells how long the stream waited for a message, for which the host does not wait. Reading moments waits for
    the stream, once per step: the host then cannot launch the next step's kernels while the last ones run.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
    """

    def moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        if not moments:
            return []
        last = self.moment()
        last.synchronize()
        now = time.perf_counter()
        return [now - moment.elapsed_time(last) / 1000 for moment in moments]  # elapsed_time is in milliseconds


def clock_of(device: torch.device) -> Clock:
    """The clock of work on this device."""
    return CudaClock() if device.type == "cuda" else HostClock()
