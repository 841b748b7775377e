"""Threads that move messages beside the rank's own, and that end before the interpreter does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["BackgroundThread"]

T = TypeVar("T")

_SECONDS = 2.0  # for a thread to end: one that waits for a message that never comes must not keep the process


class BackgroundThread(Generic[T]):
    """Calls a function with each item that is put, in order, in a thread of its own.

    A thread that still runs while the interpreter ends is unwound wherever it stands. In a C++ function of torch that
    aborts the process, and a run that has succeeded would count as killed: all threads are ended before.

    Args:
        carry_out: the function. If it raises, the thread ends: who waits for the item must meet the error, too.
        name: the thread's name in a report of stacks.
    """

    def __init__(self, carry_out: Callable[[T], None], name: str) -> None:
        self._items: SimpleQueue[tuple[T] | None] = SimpleQueue()
        thread = threading.Thread(target=_carry, args=(self._items, carry_out), name=name, daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._items, thread)  # also called before the interpreter ends

    def put(self, item: T) -> None:
        self._items.put((item,))


def _carry(items: SimpleQueue[tuple[T] | None], carry_out: Callable[[T], None]) -> None:
    while True:
        item = items.get()
        if item is None:
            return
        try:
            carry_out(*item)
        except Exception:  # told to the one who waits for the item
            return
        del item  # its tensors belong to the waiting code


def _end(items: SimpleQueue[tuple[T] | None], thread: threading.Thread) -> None:
    """Let the thread end after the items that were put, and wait for that, but not long."""
    items.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS)
