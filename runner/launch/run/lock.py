"""Keeps a run's directory for one command at a time, by a lock that works on shared file systems, too.

Two commands in one directory would delete each other's checkpoints. The lock is the file ``run.lock``. Only one process
can create it, as a link to a file that is complete; it names its owner, who touches it every few seconds while it
lives. A process on the same machine asks the kernel whether the owner lives. On another machine nobody can know that,
so a lock is taken over there when it has not been touched for a while. An owner that finds its lock taken over, for
example because its machine was suspended, ends at once and writes nothing more.

The ranks that a command starts belong to it and take no lock, so that restarts (``launcher.max_restarts``) keep it.
Under torchrun, srun and mpirun the owner is rank 0. A job that SLURM queues again takes over the lock of its own
earlier start without waiting, because SLURM has ended that one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, Problem, RequestError, RunFailedError, typed_word
from runner.files import new_file_beside, remove_unfinished
from runner.launch.run.directory import create_run_directory
from runner.launch.run.resume import AUTO, with_checkpoint

__all__ = ["LOCK_FILE", "InUseError", "Incarnation", "alone_in", "refuse_if_in_use", "take_directory"]

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # an owner on another machine that is silent for so long is dead
SURE_SECONDS = 2 * HEARTBEAT_SECONDS  # how long a lock that looks old is watched, because clocks may differ
_WITHOUT_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
SETTLE_SECONDS = 0.2  # after a lock was taken over: time for another process that does the same to be seen


class InUseError(RequestError):
    """Another command works in the directory. Its files, the record among them, must not be touched."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A command that a scheduler may start several times, and which of these starts this is.

    Args:
        name: the same at every start, e.g. the number of a job and a step of SLURM.
        start: counts the starts; when one runs, those with smaller numbers have ended.
    """

    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock.

    Args:
        host: name of the machine.
        kernel: identifies the running kernel and the namespace of process numbers, within which ``pid`` is known.
        pid, started: the process and its start in the kernel's clock ticks, because numbers are used again.
        since: when it took the lock, for messages.
        command: what the user typed.
        incarnation: see :class:`Incarnation`.
        token: differs between any two owners.
    """

    host: str
    kernel: str
    pid: int
    started: str
    since: str
    command: str
    incarnation: tuple[str, int] | None
    token: str

    @classmethod
    def this_process(cls, command: str, incarnation: Incarnation | None) -> Owner:
        return cls(
            host=socket.gethostname(),
            kernel=_kernel(),
            pid=os.getpid(),
            started=_state_and_start(os.getpid())[1],
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            command=command,
            incarnation=(incarnation.name, incarnation.start) if incarnation is not None else None,
            token=uuid.uuid4().hex,
        )

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Owner | None:
        """The inverse of :meth:`to_text`; None if its writer died while it wrote, or has not written it yet."""
        try:
            values = json.loads(text)
            incarnation = values.pop("incarnation")
            values["pid"] = max(1, int(values["pid"]))
            return cls(**values, incarnation=None if incarnation is None else (incarnation[0], incarnation[1]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def was_earlier_start_of(self, other: Owner) -> bool:
        """Whether it is an earlier start of the same command, which has therefore ended."""
        if self.incarnation is None or other.incarnation is None:
            return False
        return self.incarnation[0] == other.incarnation[0] and self.incarnation[1] < other.incarnation[1]

    def line(self) -> str:
        return f"process {self.pid} on {self.host} holds it since {self.since}: {self.command}"


def take_directory(
    config: RunConfig, command: str, held: contextlib.ExitStack, incarnation: Incarnation | None = None
) -> RunConfig:
    """Make or find the run's directory, hold it until ``held`` is closed, and find the checkpoint to continue from.

    With ``resume=auto`` the directory is taken first, so that nobody changes its checkpoints in between. Otherwise the
    checkpoint comes first, so that a wrong request writes nothing.

    Returns:
        the request with its ``run_dir``, and with ``resume`` as :func:`with_checkpoint` gives it.

    Raises:
        RequestError, RunFailedError: see :func:`with_checkpoint`, :func:`create_run_directory` and :func:`alone_in`.
    """
    if config.resume != AUTO:
        config = with_checkpoint(config)
    run_dir = create_run_directory(config.name, config.run_dir)
    held.enter_context(alone_in(run_dir, command, incarnation))
    if config.resume == AUTO:
        config = with_checkpoint(config)
    return replace(config, run_dir=str(run_dir))


@contextlib.contextmanager
def alone_in(run_dir: Path, command: str, incarnation: Incarnation | None = None) -> Iterator[None]:
    """Hold the directory's lock while the block runs.

    Args:
        run_dir: an existing directory.
        command: what the user typed, for the message that another command gets.
        incarnation: which start of the command this is, if a scheduler may start it several times.

    Raises:
        InUseError: another command holds it and lives.
        RunFailedError: the file system refuses.
    """
    path, own = run_dir / LOCK_FILE, Owner.this_process(command, incarnation)
    try:
        _take(path, own)
        remove_unfinished(run_dir, [LOCK_FILE])
    except OSError as error:
        raise RunFailedError(f"{path} cannot be written: {error.strerror or error}") from error
    done = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, own, done), name="lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join()
        with contextlib.suppress(OSError):
            if _text(path) == own.to_text():
                path.unlink()


def refuse_if_in_use(run_dir: Path) -> None:
    """Look whether a command works in the directory, without taking the lock.

    Raises:
        InUseError: one does.
    """
    path = run_dir / LOCK_FILE
    text = _text(path)
    if text is not None and not _is_over(path, text, Owner.this_process("", None)):
        raise _in_use(path, _text(path) or text)


def _take(path: Path, own: Owner) -> None:
    while not _create(path, own):
        text = _text(path)
        if text is None:
            continue  # it was released meanwhile
        if not _is_over(path, text, own):
            raise _in_use(path, _text(path) or text)
        if _take_over(path, text, own):
            owner = Owner.from_text(text)
            logger.info("the lock of a command that has ended is taken over: %s", owner.line() if owner else path)
            return


def _create(path: Path, own: Owner) -> bool:
    """Create the lock, complete at once, so that the death of this process leaves none without a name; False if there
    is one.
    """
    with _written_beside(path, own) as temporary:
        try:
            os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):  # somebody has it, and has perhaps removed what was beside it
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
            return _create_in_place(path, own)
    return True


def _create_in_place(path: Path, own: Owner) -> bool:
    """Do what :func:`_create` does, on a file system that has no hard links."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(own.to_text())
    return True


@contextlib.contextmanager
def _written_beside(path: Path, own: Owner) -> Iterator[Path]:
    """A file beside the lock that names the owner; it is removed if it is there still."""
    handle, temporary = new_file_beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(own.to_text())
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _take_over(path: Path, text: str, own: Owner) -> bool:
    """Replace the lock of a dead owner; False if somebody else has changed it meanwhile.

    Several may do this at once. The last one to replace it has it, and the others see that.
    """
    with _written_beside(path, own) as temporary:
        if _text(path) != text:
            return False
        try:
            os.replace(temporary, path)
        except FileNotFoundError:  # somebody has the lock by now, and has removed what was beside it
            return False
    time.sleep(SETTLE_SECONDS)
    return _text(path) == own.to_text()


def _is_over(path: Path, text: str, own: Owner) -> bool:
    """Whether the owner of the lock, who wrote ``text``, has ended."""
    owner = Owner.from_text(text)
    if owner is not None and owner.was_earlier_start_of(own):
        return True
    if owner is not None and (owner.host, owner.kernel) == (own.host, own.kernel):
        return not _is_alive(owner)
    return _is_silent(path, text)


def _is_silent(path: Path, text: str) -> bool:
    """Watch the lock until its owner touches it, or until it is clear that it does not.

    The ages of files are compared on the file system's clock. A lock that looks old is still watched for a moment, as
    the clocks of machines may differ.
    """
    first = _touched(path)
    if first is None:
        return True
    watched = SURE_SECONDS if _now_on(path.parent) - first > SILENT_SECONDS else SILENT_SECONDS
    end = time.monotonic() + watched
    while time.monotonic() < end:
        time.sleep(min(HEARTBEAT_SECONDS / 10, 0.5))
        if _touched(path) != first or _text(path) != text:
            return False
    return True


def _beat(path: Path, own: Owner, done: threading.Event) -> None:
    """Touch the lock until the run is done. If it has another owner, end this process at once."""
    while not done.wait(HEARTBEAT_SECONDS):
        try:
            text = _text(path)
            if text == own.to_text():
                os.utime(path)
            elif text is None:
                _create(path, own)  # somebody has removed it
            elif not done.is_set():
                _leave_to(path, text)
        except OSError as error:  # of a file system that is away for a moment; another owner would be seen later
            logger.debug("the lock %s could not be touched: %s", path, error)


def _leave_to(path: Path, text: str) -> None:
    """End this process and with it its ranks: what they would write now belongs to another command."""
    owner = Owner.from_text(text)
    who = owner.line() if owner is not None else "another command holds it"
    sys.stderr.write(f"{path.parent} was taken over, because this command gave no sign of life: {who}\n")
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def _in_use(path: Path, text: str) -> InUseError:
    owner = Owner.from_text(text)
    who = owner.line() if owner is not None else f"{path} is touched by a process that it does not name"
    why = f"{who[0].upper()}{who[1:]}; `runner report {path.parent}` shows how far it is"
    fix = typed_word("run_dir", f"{path.parent}_again")
    return InUseError([Problem("run_dir", path.parent, "must not be in use by another command", why, fix)])


def _text(path: Path) -> str | None:
    """The content of the lock, or None if there is none. To open a file makes NFS look at the server's state."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _touched(path: Path) -> float | None:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _now_on(directory: Path) -> float:
    """The time by which the file system dates files."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _kernel() -> str:
    """The running kernel and the namespace of process numbers; only the machine's name where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return sys.platform


def _is_alive(owner: Owner) -> bool:
    """Whether a process of this machine lives and is the owner, not another one with its number."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    state, started = _state_and_start(owner.pid)
    return state not in ("Z", "X") and started in ("", owner.started)


def _state_and_start(pid: int) -> tuple[str, str]:
    """The state of a process and when it started, in ticks since the boot; empty where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return state, fields[18]
