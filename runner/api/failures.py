"""Which rank of a script failed first, told as the last thing.

When one rank fails, its neighbours fail too, a moment later, because it is gone, and what they print then stands below
the cause. Ranks of a script report their failures in a folder that they share; the process that the user has started
prints the first of them when all others have ended. Under torchrun, which has a summary of its own at the end, the
failure is handed to that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from runner.errors import EXIT_FAILED, RequestError
from runner.launch.failure import RankFailure, tell_torchrun
from runner.printable import printable

__all__ = ["ScriptLauncher", "report_failure", "tell_refusals"]

_FOLDER = "RUNNER_FAILURES"  # the environment variable that names the folder
_POLL_SECONDS = 0.1
_OTHERS_SECONDS = 5.0  # for the other ranks to fail, too, when one has


def report_failure(error: BaseException, rank: int) -> None:
    """Tell the process that prints the first cause that this rank has failed; called where the error is caught."""
    tell_torchrun(error)
    folder = os.environ.get(_FOLDER)
    if folder is not None and Path(folder).is_dir():
        RankFailure.of(error).save(Path(folder) / f"{rank}.json")


def tell_refusals() -> None:
    """Let a script that asks for something wrong end with the lines that say what, without the frames above them.

    Other errors are told as before.
    """
    before = sys.excepthook
    if getattr(before, "tells_refusals", False):
        return

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RequestError):
            print(printable(str(error)), file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    told.tells_refusals = True  # type: ignore[attr-defined]
    sys.excepthook = told


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which starts the script once more for each other rank, with an end that tells the cause."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` as rank 0; at the first call, e.g. that of ``fit``, the other ranks are started before."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_FOLDER] = tempfile.mkdtemp(prefix="runner_")
            self._call_children_scripts()
            atexit.register(_at_exit, self.procs, Path(os.environ[_FOLDER]))  # after the traceback of this process
        _set_num_threads_if_needed(num_processes=self.num_processes)
        ended = threading.Event()
        arguments = (self.procs, Path(os.environ[_FOLDER]), ended)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()
        try:
            return function(*args, **kwargs)
        finally:
            ended.set()


def _at_exit(others: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """If ranks have failed, wait until all have ended and have said so, and print the first cause."""
    if any(folder.glob("*.json")):
        _end(others)
        _tell(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _watch(others: Sequence[subprocess.Popen[bytes]], folder: Path, ended: threading.Event) -> None:
    """End this process, which may wait for ever for a rank that has failed; it fails by itself where it can."""
    while not ended.wait(_POLL_SECONDS):
        if any(process.poll() not in (None, 0) for process in others):
            break
    if ended.wait(_OTHERS_SECONDS):
        return
    _at_exit(others, folder)
    os._exit(EXIT_FAILED)


def _end(others: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the other ranks have ended, which they do when a neighbour has gone, and kill those that do not."""
    until = time.monotonic() + _OTHERS_SECONDS
    while any(process.poll() is None for process in others) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    for process in others:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _tell(folder: Path) -> None:
    """Print which rank failed first, and why; nothing where no rank could report."""
    found = {path.stem: RankFailure.load(path) for path in folder.glob("*.json")}
    reports = {rank: report for rank, report in found.items() if report is not None}
    if reports:
        rank, first = min(reports.items(), key=lambda item: item[1].time)
        print(f"\nrank {rank} failed first: {first.summary()}", file=sys.stderr, flush=True)
