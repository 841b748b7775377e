"""Pauses garbage collection where plans are searched and models are profiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection.

    Large plans are millions of small tuples, and searching them doubles the time. In a profile, tensors in reference
    cycles are alive until its end, whenever the collector would have run.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
