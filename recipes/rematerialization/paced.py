"""A device of a given speed on a machine that is faster: each operator lasts as long as it would there.

So steps are measured whose seconds do not depend on what else the machine does, and a link of a given speed carries
tensors beside a device that computes at a given speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from hashlib import blake2b
from time import perf_counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from runner.profile import LayerProfile, ModelProfile
from runner.profiling.flops import operator_flops

__all__ = ["LAUNCHES", "STEP_SECONDS", "SlowDevice", "step_flops", "with_flops_as_seconds"]

STEP_SECONDS = 1.0
"""What a step that keeps everything takes on the slow device: many times what these models need by themselves."""

_WORK = bytes(20_000)  # to hash it takes some 20 microseconds, in which other threads have the interpreter's lock

_AHEAD = 0.005
"""Seconds by which calls go ahead of the device, unless their number is given."""

LAUNCHES = 1000
"""Calls that an accelerator takes ahead of what it computes; CUDA's queue holds some more."""


def step_flops(profile: ModelProfile) -> float:
    """FLOPs of a forward and backward that keep everything."""
    return sum(row.forward_flops + row.backward_flops for row in (*profile.layers, profile.loss))


def with_flops_as_seconds(profile: ModelProfile, flops_per_second: float) -> ModelProfile:
    """The profile with the seconds of a device of this speed."""

    def of(layer: LayerProfile) -> LayerProfile:
        forward, backward = layer.forward_flops / flops_per_second, layer.backward_flops / flops_per_second
        return replace(layer, forward_seconds=forward, backward_seconds=backward)

    return replace(profile, layers=tuple(map(of, profile.layers)), loss=of(profile.loss))


class SlowDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, operators take the seconds of their FLOPs, in forwards and in backwards.

    As on an accelerator, calls go ahead of what is computed, so that the time of a call is hidden as long as the device
    has something to do; the end of the context waits for all of it. A core is kept busy meanwhile, because one that
    sleeps runs slower afterwards.

    Args:
        flops_per_second: the device's speed. Operators without FLOPs take no time on the device.
        launches: how many calls go ahead of it; None: as many as a few milliseconds hold, so that another thread that
            copies tensors does so when the device would.
    """

    def __init__(self, flops_per_second: float, launches: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops_per_second = flops_per_second
        self._idle_from = 0.0  # when the device has done all that it was called for
        self._launches = launches
        self._ends = deque[float]()  # of the calls that are ahead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = perf_counter()
        made = func(*args, **(kwargs or {}))
        if flops := operator_flops(func, args, kwargs or {}, made):
            self._idle_from = max(self._idle_from, called) + flops / self._flops_per_second
            if self._launches is None:
                _compute_until(self._idle_from - _AHEAD)
        if self._launches is not None:
            self._ends.append(self._idle_from)
            if len(self._ends) > self._launches:
                _compute_until(self._ends.popleft())
        return made

    def __exit__(self, *reason: Any) -> None:
        _compute_until(self._idle_from)
        self._ends.clear()
        super().__exit__(*reason)  # type: ignore[no-untyped-call]


def _compute_until(moment: float) -> None:
    while perf_counter() < moment:
        blake2b(_WORK)
