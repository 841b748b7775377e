"""Commands as a user runs them, in a process that can be signalled, and a look for processes left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import runner

HERE = Path(__file__).parent
ROOT = Path(runner.__file__).parent.parent
OVERRIDES = ("model=mlp", "trainer.max_steps=2", "data.batch_size=8", "schedule.microbatches=2")
MARKER_VARIABLE = "RUNNER_TEST_MARKER"


def command(action: str, *arguments: str, entry: str) -> list[str]:
    """A small main program around :func:`train` or :func:`sweep`: what the command line does."""
    return [sys.executable, str(HERE / "launch_main.py"), action, f"fake_entries:{entry}", *arguments]


def environment(marker: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARKER_VARIABLE: marker}


class Started:
    """A command that runs in ``directory``, marked so that every process of it can be found."""

    def __init__(self, arguments: Sequence[str], directory: Path) -> None:
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            arguments,
            cwd=directory,
            env=environment(self.marker),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout: float = 150.0) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, err

    def left_behind(self, patience: float = 3.0) -> list[int]:
        """Processes of this command that are still alive; the kernel may take a moment to end them."""
        end = time.monotonic() + patience
        while (alive := _marked(self.marker)) and time.monotonic() < end:
            time.sleep(0.05)
        return alive


def wait_for(paths: Sequence[Path], timeout: float = 40.0) -> None:
    """Until all files are there and not empty."""
    end = time.monotonic() + timeout
    while not all(path.exists() and path.stat().st_size for path in paths):
        if time.monotonic() > end:
            raise TimeoutError(f"not all there: {[str(path) for path in paths]}")
        time.sleep(0.02)


def _marked(marker: str) -> list[int]:
    wanted = f"{MARKER_VARIABLE}={marker}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes() and _is_alive(directory):
                found.append(int(directory.name))
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def _is_alive(directory: Path) -> bool:
    return ") Z " not in (directory / "stat").read_text()
