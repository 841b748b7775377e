"""A limit for the answer to a request in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["answered_within"]


@contextmanager
def answered_within(seconds: int, words: list[str]) -> Iterator[None]:
    """Raise an AssertionError that names the request if the block takes longer; of the main thread alone."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer in {seconds} s: {words}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
