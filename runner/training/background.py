"""Writes in a thread while the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Background"]


class Background:
    """Runs one write at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        self._writing = self._pool.submit(write)

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def wait(self) -> None:
        """Wait until the write has ended, and raise its error."""
        if self._writing is not None:
            self._writing.result()
