"""Threads beside a rank: in order, ended before the interpreter is, and no longer alive than their owner."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

from runner.engine.transport.background import BackgroundThread

# The function returns from C++ code that has released the interpreter's lock only when the main thread is at its end.
ENDING = """
import ctypes, threading
from runner.engine.transport.background import BackgroundThread
begun = threading.Event()
def carry_out(seconds):
    begun.set()
    ctypes.CDLL(None).usleep(int(seconds * 1e6))
    print("carried out", flush=True)
thread = BackgroundThread(carry_out, "messages")
thread.put(0.2)
begun.wait()
"""


def test_items_are_carried_out_in_order() -> None:
    done: list[int] = []
    all_done = threading.Event()
    thread = BackgroundThread[int](lambda item: done.append(item) if item < 100 else all_done.set(), "numbers")
    for item in range(101):
        thread.put(item)
    assert all_done.wait(60)
    assert done == list(range(100))


def test_it_ends_with_its_owner() -> None:
    thread = BackgroundThread[int](lambda item: None, "forgotten")
    assert "forgotten" in {each.name for each in threading.enumerate()}
    del thread
    gc.collect()
    assert "forgotten" not in {each.name for each in threading.enumerate()}


def test_an_error_ends_it() -> None:
    def fail(item: int) -> None:
        raise RuntimeError("told to the one who waits")

    thread = BackgroundThread[int](fail, "failing")
    thread.put(0)
    for each in threading.enumerate():
        if each.name == "failing":
            each.join(60)
    assert "failing" not in {each.name for each in threading.enumerate()}


def test_the_interpreter_ends_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "carried out\n", "")
