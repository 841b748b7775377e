"""Starts ``runner train`` with the injector in all of its processes, by a fork of this process, which has imported.

A command, the process that its ranks are forked from and a single rank each import for seconds. Here they find the
imports made, as the ranks of a restart do; else each is what an executed process is: its arguments, environment,
session, descriptors and parent are its own. A command cannot fork its template itself, because it has planned by then.
So a process as fresh as the command was, the *seed*, is forked first, and forks what the command starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from runner.cli.main import main
from runner.launch import rank, start
from runner.launch.local import forked, template
from runner.launch.local.forked import Forked
from runner.launch.processes import supervise
from runner.launch.processes.stops import ignore_preemption
from runner.launch.processes.supervise import Process, ProcessSpec
from runner.recipes.faults import inside

__all__ = ["IMPORTS", "fork_command"]

IMPORTS = (
    *("runner.cli.train", "runner.cli.request", "runner.launch.run.resume", "runner.plan.make", "hydra.compose"),
    *("hydra.core.plugins", "runner.report.tables", "runner.report.ending", "runner.training.run_plan"),
    *("runner.profiling.model", "runner.training.measure.timelines", "lightning.pytorch.loggers"),
)
"""Modules that a run imports when it needs them."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_HIGH = 500  # descriptors from here on are nobody's
_MOST_BYTES = 1 << 20
_LOST = 70  # the exit status of a process that was not even begun
_prctl = ctypes.CDLL(None).prctl


def fork_command(words: Sequence[str], orders: Path, directory: Path, output: Path) -> int:
    """Start ``runner WORDS`` as a child of this process, which must have one thread, and return its number.

    Args:
        words: the words after ``runner``.
        orders: the file with the injector's orders.
        directory: where the command works.
        output: the file to which its output and errors are appended.
    """
    child = os.fork()
    if child:
        return child
    try:
        _be_command(words, orders, directory, output)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_LOST)


def _be_command(words: Sequence[str], orders: Path, directory: Path, output: Path) -> NoReturn:
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(directory)
    _redirect(output)
    os.environ[inside.FAULTS_VARIABLE] = str(orders)
    seed = _Seed()
    begin = functools.partial(_start, seed, supervise.start)
    for module in (forked, supervise):
        inside.put_in(module, start=begin)
    inside.install("command")
    inside.put_in(start, train=functools.partial(start.train, entry=inside.ENTRY))
    sys.argv[:] = ["runner", *words]
    _leave(main())


def _redirect(output: Path) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _leave(status: int) -> NoReturn:
    """End without the interpreter's own teardown, which takes longer than many a command."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls before the exit functions
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Seed:
    """A process that forks what this process starts, and ends with it."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        if os.fork() == 0:
            self._end.close()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _serve(theirs)
        theirs.close()
        self._end = socket.socket(fileno=fcntl.fcntl(self._end.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH))

    def start(self, spec: ProcessSpec) -> Forked:
        before = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        environment = {**os.environ, **spec.environment, supervise.PARENT_VARIABLE: str(os.getpid())}
        numbers = (*spec.pass_fds, 2) if spec.to_stderr else spec.pass_fds
        asked = json.dumps([list(spec.command[2:]), environment, numbers])
        try:
            socket.send_fds(self._end, [asked.encode()], list(numbers) or [2])
            return Forked(int.from_bytes(self._end.recv(8), "big"))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _start(seed: _Seed, execute: Callable[[ProcessSpec], Process], spec: ProcessSpec) -> Process:
    """As :func:`runner.launch.processes.supervise.start`; a rank beside rank 0 reads its number in its imports."""
    module = spec.command[2]
    if module == template.__name__ or (module == rank.__name__ and spec.log is None):
        return seed.start(spec)
    return execute(spec)


def _serve(end: socket.socket) -> NoReturn:
    """Fork what is asked for until nobody asks any more."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(end, _MOST_BYTES, 64)
        if not said:
            os._exit(0)
        tell, told = os.pipe()
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(told, child.to_bytes(8, "big"))
                os._exit(0)
            os.read(wait, 1)  # by now the parent is who asked
            for each in (tell, told, wait, go, end.detach()):
                os.close(each)
            _be(said, descriptors)
        os.waitpid(between, 0)
        os.write(go, b"x")
        end.sendall(os.read(tell, 8))
        for each in (tell, told, wait, go, *descriptors):
            os.close(each)


def _be(said: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Become the template, or a rank, that was asked for."""
    try:
        (module, *words), environment, numbers = json.loads(said)
        os.setsid()
        _renumber(descriptors, numbers)
        os.environ.clear()
        os.environ.update(environment)
        inside.install("template")
        if module == rank.__name__:
            rank.run(Path(words[0]), Path(words[1]), words[2])
        supervise.die_with_parent()
        ignore_preemption()
        faulthandler.enable()
        template.main(json.loads(words[0]), *map(int, words[1:4]))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_LOST)


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor the number by which the words name it."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for own, number in zip(high, numbers, strict=False):  # a descriptor goes along where none is asked for
        os.dup2(own, number)
    for own in high:
        with contextlib.suppress(OSError):
            os.close(own)
