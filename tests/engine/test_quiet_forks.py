"""A fork of a rank waits for threads that run, and not for those that sleep or that run for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.engine.transport import quiet_forks

# A native call that has released the interpreter's lock runs while the main thread forks.
FORKING = """
import os, threading, time, zlib
from runner.engine.transport import quiet_forks

quiet_forks._MOST_SECONDS = 60
quiet_forks.forks_wait_for_threads()
quiet_forks.forks_wait_for_threads()  # once is enough
data, ended = bytes(64 << 20), threading.Event()

def run():
    zlib.crc32(data)
    ended.set()
    threading.Event().wait()

threading.Thread(target=run, daemon=True).start()
while not ended.is_set() and not quiet_forks._another_runs():  # until the call has begun
    time.sleep(0.0001)
child = os.fork()
if child == 0:
    os._exit(int(ended.is_set()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what threads do")
def test_a_fork_waits_for_a_native_call_of_another_thread() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=1500, check=True)
    assert done.stdout.split() == ["1"]


class Threads:
    """The system's list of this process's threads, and a clock; each pause lets half a millisecond pass.

    Args:
        running: the number of pauses after which the other thread sleeps.
    """

    def __init__(self, folder: Path, running: int) -> None:
        self.folder, self.running, self.now, self.pauses = folder, running, 0.0, 0
        self.show(threading.get_native_id(), "R")
        self.show(os.getpid() + 1_000_000, "R" if running else "S")

    def show(self, thread: int, state: str) -> None:
        (self.folder / str(thread)).mkdir(exist_ok=True)
        (self.folder / str(thread) / "stat").write_text(f"{thread} (a (b) R) {state} 1 1", encoding="utf-8")

    def sleep(self, seconds: float) -> None:
        self.now, self.pauses = self.now + seconds, self.pauses + 1
        if self.pauses == self.running:
            self.show(os.getpid() + 1_000_000, "S")


@pytest.mark.parametrize(("running", "pauses"), [(0, 0), (7, 7), (10_000, 500)])
def test_it_waits_while_another_thread_runs_and_no_longer_than_a_quarter_of_a_second(
    running: int, pauses: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads = Threads(tmp_path, running)
    monkeypatch.setattr(quiet_forks, "_THREADS", tmp_path)
    monkeypatch.setattr(quiet_forks, "time", SimpleNamespace(sleep=threads.sleep, monotonic=lambda: threads.now))
    quiet_forks._wait()
    assert threads.pauses == pytest.approx(pauses, abs=1)
