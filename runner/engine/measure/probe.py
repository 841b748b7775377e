"""Measures the durations that a prediction needs, before the first step and with all ranks busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

from runner.engine.measure.timeline import Timeline
from runner.engine.transport.base import Channel, Transport

__all__ = ["message_seconds", "seconds_per_action", "update_seconds", "window_seconds"]

_ROUND_TRIPS = 7


def seconds_per_action(
    measured: Timeline, op: str, stage: int, size_of: Callable[[int | None], float] = lambda _: 1.0
) -> float:
    """Median seconds of one compute action of a stage, over all windows except the first.

    Args:
        measured: what was measured.
        op, stage: name the actions.
        size_of: the size of each micro-batch; the seconds are for one of size 1.
    """
    windows = [events for _, events in measured.events]
    all_of_them = [e for events in windows[1:] or windows for e in events if (e.op, e.stage) == (op, stage)]
    return median((e.end - e.start) / size_of(e.microbatch) for e in all_of_them) if all_of_them else 0.0


def window_seconds(measured: Timeline) -> float:
    """Median seconds from the end of one window to the end of the next; 0 if there was one window only."""
    ends = [times.end for times in measured.steps]
    return median(after - before for before, after in pairwise(ends)) if len(ends) > 1 else 0.0


def message_seconds(transport: Transport, pipeline: Sequence[int], num_bytes: int) -> float:
    """Median seconds of one message between this rank and its neighbours in the pipeline, as half a round trip.

    All ranks of the pipeline must call it together; one pair of neighbours is measured after the other.
    """
    position = list(pipeline).index(transport.rank)
    found = [0.0]
    for edge in range(len(pipeline) - 1):
        if position in (edge, edge + 1):
            peer = pipeline[edge + 1] if position == edge else pipeline[edge]
            found.append(_round_trip(transport, peer, num_bytes, first=position == edge) / 2)
    return max(found)


def _round_trip(transport: Transport, peer: int, num_bytes: int, *, first: bool) -> float:
    buffer = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=transport.device)
    seconds = []
    for _ in range(_ROUND_TRIPS + 1):
        start = time.perf_counter()
        for sending in (first, not first):
            move = transport.send if sending else transport.receive
            move(buffer, peer, Channel.ACTIVATION).wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def update_seconds(update: Callable[[], None], repetitions: int = 4) -> float:
    """Median seconds of ``update``, without a first call, which may allocate."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
