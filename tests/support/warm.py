"""Commands that share their imports: forked from a process that has imported, not executed.

``python -m runner train`` imports for seconds, three times: the command, the process that ranks are forked from, and
a single rank. :class:`Warm` and :func:`run` start such commands as :class:`subprocess.Popen` and
:func:`subprocess.run` do, and each is a process of its own with the arguments, environment, directory and descriptors
asked for; only what it imports is there already. That a command works when it is executed has its own tests.

``python warm.py SOCKET_FD MODULES`` is the process that forks (:func:`serve`). What it forks becomes a child of who
asked: the process in between ends, and who asked has made itself the reaper of orphans for that moment. A command has
such a process for itself, as fresh as its own, for what it starts in its turn (``python -m`` of :data:`WARM`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "runner.cli.main", "runner.cli.commands", "runner.launch.start", "runner.launch.run.resume",
    "runner.launch.verify", "runner.launch.local.ranks", "runner.plan.make", "runner.training.run",
    "runner.cli.request", "runner.cli.train", "runner.report.write",
    "hydra._internal.config_loader_impl", "runner.config.compose.option_folder", "omegaconf", "socketserver",
)  # fmt: skip
WARM = {"runner.launch.local.template", "runner.launch.rank", "runner.launch.sweep.job"}
"""What a command may start, as ``python -m``, from a forked process, too."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_HIGH = 500  # descriptors from here on are nobody's
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True)
class Request:
    """What to start: the words after ``python``, and the numbers that the descriptors sent along get."""

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    numbers: Sequence[int]
    leads_session: bool


class Server:
    """The other end of a process that forks."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def start(self, request: Request, descriptors: Sequence[int]) -> int:
        """The number of a new child of this process."""
        said = json.dumps(asdict(request)).encode()
        before = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._end, [len(said).to_bytes(8, "big")], list(descriptors))
            self._end.sendall(said)
            pid = int.from_bytes(_exactly(self._end, 8), "big")
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
        return pid


class Warm(subprocess.Popen[str]):
    """As :class:`subprocess.Popen` of a command ``[sys.executable, ...]``, but forked.

    The one way to keep all of its behaviour is to replace how it executes, which is no public method.
    """

    imports: ClassVar[tuple[str, ...]] = IMPORTS
    _server: ClassVar[Server | None] = None  # a command's own; else one of this process
    _signature: ClassVar[inspect.Signature] = inspect.signature(
        subprocess.Popen._execute_child  # type: ignore[attr-defined]
    )

    def _execute_child(self, *given: object) -> None:
        asked = self._signature.bind(self, *given).arguments
        executable, *words = map(os.fspath, asked["args"])
        if executable != sys.executable or not self._may_fork(words, asked["env"]):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        standard = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
        handed = {number: number if own == -1 else own for number, own in standard.items()}
        handed |= {number: number for number in asked["pass_fds"]}
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        directory = os.path.abspath(os.fspath(asked["cwd"] or "."))
        request = Request(words, environment, directory, list(handed), bool(asked["start_new_session"]))
        try:
            self.pid = (self._server or _server_of_this_process(self.imports)).start(request, list(handed.values()))
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[end] for end in ends))  # type: ignore[attr-defined]

    @classmethod
    def _may_fork(cls, words: Sequence[str], environment: Mapping[str, str] | None) -> bool:
        """Anything that a test starts, and of what a command starts that which is known to be fit for it.

        A rank with a number other than 0 reads it in its imports.
        """
        return cls._server is None or _is_fit(words, environment)


class WarmZero(Warm):
    """With DeepSpeed, which takes seconds more."""

    imports = (*IMPORTS, "deepspeed")


class WarmRanks(Warm):
    """What a command starts that runs in the process of a test."""

    @classmethod
    def _may_fork(cls, words: Sequence[str], environment: Mapping[str, str] | None) -> bool:
        return _is_fit(words, environment)


def _is_fit(words: Sequence[str], environment: Mapping[str, str] | None) -> bool:
    return words[0] == "-m" and words[1] in WARM and (environment or {}).get("RANK", "0") == "0"


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float = 1500, kind: type[Warm] = Warm
) -> subprocess.CompletedProcess[str]:
    """As :func:`subprocess.run` with the output captured as text, but forked."""
    with kind(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@functools.cache
def _server_of_this_process(imports: tuple[str, ...]) -> Server:
    ours, theirs = socket.socketpair()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with theirs:
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), *imports],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd="/", stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
        )  # fmt: skip
    return Server(ours)


def serve(end: socket.socket) -> tuple[Request, list[int]]:
    """Fork what is asked for until nobody asks any more. Returns in every process that was forked."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while asked := _receive(end):
        tell, told = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.read(wait, 1)  # by now the parent is who asked
            if asked[0].leads_session:  # before it is told: who asked may kill the session at once
                os.setsid()
            os.write(told, os.getpid().to_bytes(8, "big"))
            for each in (tell, told, wait, go, end.detach()):
                os.close(each)
            return asked
        os.waitpid(between, 0)
        os.write(go, b"x")
        end.sendall(os.read(tell, 8))
        for each in (tell, told, wait, go, *asked[1]):
            os.close(each)
    os._exit(0)


def _receive(end: socket.socket) -> tuple[Request, list[int]] | None:
    said, descriptors, _, _ = socket.recv_fds(end, 8, 64)
    if len(said) < 8:
        return None
    return Request(**json.loads(_exactly(end, int.from_bytes(said, "big")))), list(descriptors)


def _exactly(end: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = end.recv(count - len(said))
        if not more:
            raise ConnectionError("the process that forks commands has died")
        said += more
    return said


def _live(end: socket.socket, paths: Sequence[str]) -> NoReturn:
    request, descriptors = serve(end)
    if request.words[0] != "-m" or request.words[1] not in WARM - {"runner.launch.sweep.job"}:
        _have_server(paths)
    _become(request, descriptors, paths)
    status = 1
    try:
        _execute(request.words)
        status = 0
    except SystemExit as error:
        status = _status_of(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    _leave(status)


def _status_of(error: SystemExit) -> int:
    """As the interpreter takes it."""
    if isinstance(error.code, int) or error.code is None:
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _leave(status: int) -> NoReturn:
    """End without the interpreter's own teardown, which takes longer than many a command."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _have_server(paths: Sequence[str]) -> None:
    """Have what this process starts forked from another one like it, which ends with it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        os.chdir("/")
        _live(theirs, paths)
    theirs.close()
    os.set_inheritable(ours.fileno(), False)
    Warm._server = Server(socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH)))
    subprocess.Popen = Warm  # type: ignore[misc, assignment]


def _become(request: Request, descriptors: Sequence[int], paths: Sequence[str]) -> None:
    """Make this process what an executed one would be."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for own, number in zip(high, request.numbers, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    first = str(Path(request.words[0]).resolve().parent) if request.words[0].endswith(".py") else request.directory
    asked = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *(os.path.abspath(each) for each in asked), *paths]
    importlib.invalidate_caches()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGHUP):  # this process may have been started to ignore them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    random.seed()
    _seed_libraries()


def _seed_libraries() -> None:
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


def _execute(words: Sequence[str]) -> None:
    kind, *rest = words
    if kind == "-m":
        sys.argv[:] = rest
        warnings.filterwarnings("ignore", message=".* found in sys.modules after import", category=RuntimeWarning)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = words
        runpy.run_path(kind, run_name="__main__")


def _main(end: int, imports: Sequence[str]) -> NoReturn:
    own = {str(Path(__file__).resolve().parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [str(ROOT), *(each for each in sys.path if each not in own)]
    sys.modules["warm"] = sys.modules["__main__"]
    for module in imports:
        importlib.import_module(module)
    with contextlib.suppress(ChildProcessError):  # libraries end their threads at a first fork
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread runs: what it holds would be held for ever in a child"
    gc.collect()
    gc.freeze()  # what is imported stays: no collection looks at it, and no page of it is copied for that
    _live(socket.socket(fileno=end), sys.path[1:])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
