"""What the kinds of faults do, called in the process and at the place in which they are injected."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runner.recipes.faults.state import State

__all__ = ["Act", "Here", "InjectedError", "ShortWriteError"]

_DAY_SECONDS = 86_400.0


class InjectedError(Exception):
    """An exception of a user's function."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where an act is called.

    Args:
        number: how many faults have been injected, this one included.
        count: which time the place was reached.
        state: what this process and the campaign share.
        executor: the engine's executor, where this process has one.
    """

    number: int
    count: int
    state: State
    executor: Any

    @property
    def command(self) -> int:
        """The process of the command; this one, if it is no rank's and no template's."""
        return int(os.environ.get("RUNNER_PARENT_PID", os.getpid()))


Act = Callable[[Here], None]


def kill(here: Here) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_command(here: Here) -> NoReturn:
    """The command first, which takes its ranks with it; then this process, wherever the kernel is with that."""
    os.kill(here.command, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives SIGKILL")


def signal_command(number: int) -> Act:
    """Send a signal to the command."""
    return lambda here: os.kill(here.command, number)


def signal_self(number: int) -> Act:
    """Send a signal to this process."""
    return lambda here: os.kill(os.getpid(), number)


def wait_for_campaign(here: Here) -> None:
    """Stay here until the campaign has done what it does meanwhile."""
    here.state.wait_for_release(here.number)


def fail(here: Here) -> None:
    raise InjectedError("an injected error")


def leave_politely(here: Here) -> None:
    sys.exit(0)


def leave_at_once(here: Here) -> None:
    os._exit(0)


def crash(here: Here) -> None:
    ctypes.string_at(0)


def abort(here: Here) -> None:
    os.abort()


def hang(here: Here) -> None:
    while True:
        time.sleep(3600)


def hang_with_lock(here: Here) -> None:
    """Native code that holds the interpreter's lock."""
    while True:
        ctypes.PyDLL(None).sleep(3600)


def error(number: int) -> Act:
    """The system refuses this call, once."""

    def raise_it(here: Here) -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


class ShortWriteError(OSError):
    """Half of what was to be written is there."""


def short_write(here: Here) -> None:
    raise ShortWriteError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(here: Here) -> None:
    """The system refuses this call and all that would need space, in all processes of this command."""
    here.state.errno = errno.ENOSPC
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def turn_clock(days: int) -> Act:
    """The wall clock jumps, for this process."""

    def jump(here: Here) -> None:
        real = time.time
        time.time = lambda: real() + days * _DAY_SECONDS

    return jump


def reset_connections(here: Here) -> None:
    """Every connection over the network is closed, in both directions."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.getpeername()
                found.shutdown(socket.SHUT_RDWR)


def lose_messages(here: Here) -> None:
    """From now on nothing arrives that this rank sends: its network is another one than its peers'."""
    transport = type(here.executor._rank.transport)
    transport.send = lambda *_, **__: _Sent()
    transport.all_reduce = lambda *_, **__: _Never()


def flip_weight(here: Here) -> None:
    """The lowest bit of one number of a weight."""
    import torch

    stages = here.executor._rank.stages
    parameters = [each for stage in sorted(stages) for each in stages[stage].parameters()]
    flat = parameters[here.count % len(parameters)].data.view(-1).view(torch.int32)
    flat[here.count % len(flat)] ^= 1


class _Sent:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class _Never:
    def wait(self) -> NoReturn:
        while True:
            time.sleep(3600)

    def is_completed(self) -> bool:
        return False
