"""Commands as a user runs them, in a process that can be signalled, and a look for processes left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from processes import left_behind
from warm import Warm

import runner

HERE = Path(__file__).parent
ROOT = Path(runner.__file__).parent.parent
OVERRIDES = ("model=mlp", "trainer.max_steps=2", "data.batch_size=8", "schedule.microbatches=2")


def command(action: str, *arguments: str, entry: str) -> list[str]:
    """A small main program around :func:`train` or :func:`sweep`: what the command line does."""
    return [sys.executable, str(HERE / "launch_main.py"), action, f"fake_entries:{entry}", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Started:
    """A command that runs in ``directory``, where every process of it can be found.

    Args:
        executed: nothing of it is imported beforehand (see :mod:`warm`).
    """

    def __init__(self, arguments: Sequence[str], directory: Path, *, executed: bool = False) -> None:
        self._directory = directory
        self.process: subprocess.Popen[str] = (subprocess.Popen if executed else Warm)(
            arguments,
            cwd=directory,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout: float = 1500) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, err

    def left_behind(self) -> list[int]:
        """Processes of this command that are still alive."""
        return left_behind(self._directory)


def wait_for(paths: Sequence[Path], timeout: float = 1500) -> None:
    """Until all files are there and not empty."""
    end = time.monotonic() + timeout
    while not all(path.exists() and path.stat().st_size for path in paths):
        if time.monotonic() > end:
            raise TimeoutError(f"not all there: {[str(path) for path in paths]}")
        time.sleep(0.02)
