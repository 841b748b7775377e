"""How a rank reports its own failure: in a file, from which the parent shows it and chooses the exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.config.units import format_bytes
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_WRONG_REQUEST, RunnerError
from runner.record import Status, write_atomically

__all__ = ["RankFailure", "error_file", "is_interrupt", "log_file", "status_of", "tell_torchrun", "unwritable"]

# torch has no exception type for exhausted CPU memory: it raises RuntimeError with one of these texts.
_OUT_OF_MEMORY_WORDS = ("DefaultCPUAllocator", "can't allocate memory", "CUDA out of memory")


_TORCHRUN = "TORCHELASTIC_ERROR_FILE"  # where torchrun reads why a rank failed
_SHARED_MEMORY = Path("/dev/shm")
_PROBE_BYTES = 4096  # a nearly full disk may still have room for an empty file
_WORKER = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.")
# How torch and the kernel tell that the workers of a loader, which hand batches over through it, found it full.
_SHARED_MEMORY_FULL = re.compile(
    r"shared memory\(shm\)|shared memory object|out of shared memory|unable to \w+ .*</torch_\d+|"
    r"killed by signal: Bus error"
)
# What a rank says that ends because another one has ended.
_CONNECTION_LOST = re.compile(
    r"closed its connection: it has ended|Connection (?:closed|reset) by peer|gloo.*Broken pipe"
)
_LATE = re.compile(r"Timed out waiting (\d+)ms for \w+ operation")  # what Gloo says
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception that ended a rank.

    Args:
        type, message, traceback: type, message and traceback of the exception.
        where: ``file:line in function``, the innermost frame outside installed packages; empty if there is none.
        explained: whether the message alone tells the user what to do, so that no traceback is needed.
        exit_status: the exit status of the rank.
        time: seconds since the epoch, to tell the first failure from those that it caused.
    """

    type: str
    message: str
    traceback: str
    where: str
    explained: bool
    exit_status: int
    time: float

    @classmethod
    def of(cls, error: BaseException, run_dir: Path | None = None) -> RankFailure:
        """Describe an exception that has just been caught.

        Args:
            run_dir: where the run writes. If it cannot be written any more, this explains an error of the system.
        """
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            error = error.__context__  # for which Lightning ends the process
        found = _in_loader_worker(str(error))
        cause = unwritable(run_dir) if run_dir is not None and isinstance(error, OSError) else None
        cause = cause or _shared_memory_full(str(error))
        return cls(
            type=type(error).__name__,
            message=cause or (found[0] if found is not None else _late_message(str(error)) or str(error)),
            traceback="".join(traceback.format_exception(error)),
            where=found[1] if found is not None else _where(error),
            explained=cause is not None or isinstance(error, RunnerError),
            exit_status=_exit_status(error),
            time=time.time(),
        )

    @property
    def follows(self) -> bool:
        """Whether it says no more than that another rank has ended."""
        return _CONNECTION_LOST.search(self.message) is not None

    def summary(self) -> str:
        """One line: the message of the runner's own errors; type, message and place of any other error."""
        first = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        if self.explained:
            return first
        said = f"{self.type}: {first}" if first else self.type
        return f"{said} ({self.where})" if self.where else said

    def save(self, path: Path) -> None:
        """Write this failure as JSON."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> RankFailure | None:
        """Return what the rank wrote, or None if it ended before it could write."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


def log_file(run_dir: Path, rank: int) -> Path:
    """Path of the standard output and error of rank ``rank``; for rank 0 the file holds only its traceback."""
    return run_dir / "logs" / f"rank_{rank}.log"


def error_file(run_dir: Path, rank: int) -> Path:
    """Path of the file in which rank ``rank`` leaves its :class:`RankFailure`."""
    return run_dir / "logs" / f"rank_{rank}.error.json"


def tell_torchrun(error: BaseException) -> None:
    """Hand a failure to torchrun, whose summary of the rank that failed first is the last thing printed."""
    if _TORCHRUN in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal ended the rank's work. Lightning calls ``sys.exit(1)`` where it catches a KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
    )


def unwritable(run_dir: Path) -> str | None:
    """Why nothing can be written into a run's directory, which existed once; None if it can."""
    if not run_dir.is_dir():
        return f"the run directory {run_dir} was removed during the run"
    try:
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return f"the run directory {run_dir} cannot be written: {error.strerror or error}"
    return None


def status_of(exit_status: int) -> Status:
    """The record's status for a run that ended with this exit status."""
    if exit_status == EXIT_WRONG_REQUEST:
        return "unsupported"
    return "out_of_memory" if exit_status == EXIT_DOES_NOT_FIT else "failed"


def _exit_status(error: BaseException) -> int:
    if isinstance(error, RunnerError):
        return error.exit_status
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return EXIT_DOES_NOT_FIT
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY_WORDS):
        return EXIT_DOES_NOT_FIT
    return EXIT_FAILED


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost([(frame.filename, frame.lineno, frame.name) for frame in frames])


def _innermost(frames: Sequence[tuple[str, int | None, str]]) -> str:
    own = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith("<")]
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}" if own else ""


def _shared_memory_full(message: str) -> str | None:
    """What an error means that torch raises where loader workers have no room for a batch; None if it is none."""
    if _SHARED_MEMORY_FULL.search(message) is None:
        return None
    size = f" ({format_bytes(shutil.disk_usage(_SHARED_MEMORY).total)})" if _SHARED_MEMORY.is_dir() else ""
    return (
        f"{_SHARED_MEMORY}{size} is too small for the batches that the workers of data.workers hand over through it: "
        "start the container with --shm-size=1g, or take data.workers=0"
    )


def _late_message(message: str) -> str | None:
    """What Gloo's error about a message that did not arrive in time means, or None if it is none."""
    late = _LATE.search(message)
    if late is None:
        return None
    return f"a message between ranks timed out after {int(late[1]) / 1000:g} s: a rank hangs, or a connection is lost"


def _in_loader_worker(message: str) -> tuple[str, str] | None:
    """Return message and place of an exception in a DataLoader worker, or None if it is none.

    torch passes such an exception on as the text of its traceback.
    """
    worker = _WORKER.match(message)
    if worker is None:
        return None
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(message)]
    _, _, said = message.rstrip().splitlines()[-1].partition(": ")
    return f"{said} (in loader worker {worker[1]})", _innermost(frames)
