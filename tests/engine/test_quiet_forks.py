"""A fork of a rank waits for threads that run, and not for those that sleep or that run for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A native call that has released the interpreter's lock runs while the main thread forks.
FORKING = """
import os, sys, threading, time, zlib
from runner.engine.transport.quiet_forks import forks_wait_for_threads

if sys.argv[1] == "guarded":
    forks_wait_for_threads()
    forks_wait_for_threads()  # once is enough
data = bytes(int(sys.argv[2]) << 20)
begun, ended = threading.Event(), threading.Event()

def run():
    begun.set()
    zlib.crc32(data)
    ended.set()
    threading.Event().wait()

threading.Thread(target=run, daemon=True).start()
begun.wait()
time.sleep(0.002)  # until the call has begun
before = time.monotonic()
child = os.fork()
if child == 0:
    os._exit(int(ended.is_set()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - before < 60, flush=True)
os._exit(0)
"""
MEGABYTES = 32  # takes 10 to 50 ms; the guard waits 250 ms at most


def _forked(guard: str, megabytes: int) -> list[str]:
    line = [sys.executable, "-c", FORKING, guard, str(megabytes)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what threads do")
def test_a_fork_waits_for_a_native_call_of_another_thread() -> None:
    assert _forked("guarded", MEGABYTES) == ["1", "True"]


def test_without_the_guard_it_does_not() -> None:
    assert _forked("plain", 16 * MEGABYTES) == ["0", "True"]


def test_a_thread_that_runs_for_long_does_not_keep_the_fork() -> None:
    assert _forked("guarded", 96 * MEGABYTES) == ["0", "True"]
