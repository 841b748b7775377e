"""Runs functions in a child process, where code of others can neither crash this process nor leave anything in it.

A user's code on fake tensors may do what they cannot: a copy of a tensor's storage, for example, reads and writes
memory that is not there. What is made of it then breaks the process now or at its end. The child returns a value and
ends at once, without any teardown.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from runner.errors import Problem, RequestError, RunnerError
from runner.noise import hide_noise
from runner.parent import end_with

__all__ = ["ApartError", "EndedError", "apart", "quietly"]

P = ParamSpec("P")
T = TypeVar("T")

_POLL_SECONDS = 0.05
_OF_CHILD = threading.local()
_TOLD: dict[Any, Any] = {}
"""The warnings that children have given, so that each is told once for each place."""


class ApartError(Exception):
    """An error in the child that is none of the runner's own; its text is that of the error."""


class EndedError(ApartError):
    """The child has ended before it had a result, for example by a segmentation fault."""


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a child process and return its value, which can be pickled.

    The child is a fork of this process, so that the function may be any. If autograd has started threads here, which it
    does for each GPU, torch refuses every backward in a fork; the child is then a new process, and the function and
    what it is called with must be picklable. It computes with one thread, because the others of this process do not
    exist there, and must not use a GPU. Log records, warnings and output of the function are those of this process.
    Within a child, the function is simply called.

    Raises:
        RunnerError: what the function raised; a :class:`RequestError` has its problems.
        EndedError: the child ended before it had a result.
        ApartError: the function raised another error.
    """
    if getattr(_OF_CHILD, "inside", False):
        return _called_here(function, args, kwargs)  # type: ignore[no-any-return]
    call: Any = partial(function, *args, **kwargs)
    kind = "fork"
    while True:
        context: Any = multiprocessing.get_context(kind)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_run, args=(os.getpid(), sender, call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which the child never meets
            child.start()
        sender.close()
        try:
            kind, value = _result(child, receiver)
        finally:
            receiver.close()
            child.kill()  # where this process is interrupted
            child.join()
        if kind == "value":
            return value  # type: ignore[no-any-return]
        if kind == "error":
            error, told = value
            raise error from _TracebackOfChild(told)
        kind, call = "spawn", _Sent(pickle.dumps(call), _log_levels(), logging.root.manager.disable)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a new process calls, and how much of it this one wants to be told.

    Args:
        pickled: the call, for which the new process imports modules: only when it has the levels.
        levels: the levels of loggers that were given one, by name.
        disabled: up to this level no logger tells anything.
    """

    pickled: bytes
    levels: dict[str, int]
    disabled: int

    def __call__(self) -> Any:
        hide_noise()
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        logging.disable(self.disabled)
        warnings.simplefilter("always")  # the other process has the filters
        return pickle.loads(self.pickled)()


def _log_levels() -> dict[str, int]:
    known = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: each.level for name, each in known.items() if isinstance(each, logging.Logger) and each.level}


def quietly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like :func:`apart`, and nothing that the function tells or writes to the terminal is seen."""
    return apart(_quiet, function, args, kwargs)  # type: ignore[no-any-return]


def _quiet(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    logging.disable()
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    return function(*args, **kwargs)


def _called_here(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except RunnerError:
        raise
    except Exception as error:
        raise ApartError(str(error) or type(error).__name__) from error


class _TracebackOfChild(Exception):
    """Shows the child's traceback where this process shows its own."""


def _result(child: Any, receiver: Connection) -> tuple[str, Any]:
    """What the child sends at last; until then its records and warnings are told."""
    while True:
        if not receiver.poll(_POLL_SECONDS) and not child.is_alive() and not receiver.poll():
            raise EndedError(_how_ended(child))
        if not receiver.poll():
            continue
        try:
            kind, value = receiver.recv()
        except EOFError:
            child.join()
            raise EndedError(_how_ended(child)) from None
        if kind == "record":
            log = logging.getLogger(value.name)
            if log.filter(value):
                log.callHandlers(value)
        elif kind == "warning":
            message, category, filename, line = value
            warnings.warn_explicit(message, category, filename, line, registry=_TOLD)
        else:
            return kind, value


def _how_ended(child: Any) -> str:
    code = child.exitcode
    with contextlib.suppress(ValueError):
        return f"its process ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}"


def _run(parent: int, sender: Connection, call: Callable[[], Any]) -> NoReturn:
    """Call the function in this child and end the process."""
    try:
        _OF_CHILD.inside = True
        end_with(parent)
        faulthandler.disable()  # a crash is told by the parent
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        _send_what_is_told(sender)
        sender.send_bytes(_answer(call))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(0)


def _answer(call: Callable[[], Any]) -> bytes:
    try:
        _try_backward()
    except RuntimeError:
        return pickle.dumps(("unfit", None))
    try:
        return pickle.dumps(("value", call()))
    except RequestError as error:
        return _error(RequestError([_sendable(problem) for problem in error.problems]), error)
    except RunnerError as error:
        return _error(error, error)
    except BaseException as error:  # also a call of sys.exit
        return _error(ApartError(str(error) or type(error).__name__), error)


def _error(sent: Exception, error: BaseException) -> bytes:
    return pickle.dumps(("error", (sent, "\n" + "".join(traceback.format_exception(error)))))


def _try_backward() -> None:
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _sendable(problem: Problem) -> Problem:
    """The problem with a value that can be pickled, and is shown as its own."""
    try:
        return pickle.loads(pickle.dumps(problem))  # type: ignore[no-any-return]
    except Exception:  # the value may be any object of a user's
        return replace(problem, value=str(problem.value))


def _send_what_is_told(sender: Connection) -> None:
    """Let log records and warnings be those of the parent."""

    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
        sender.send(("record", logging.makeLogRecord(_plain(vars(record)))))

    def show(message: Warning | str, category: type[Warning], filename: str, line: int, *_: object) -> None:
        try:
            told = pickle.dumps(("warning", (message, category, filename, line)))
            pickle.loads(told)
        except Exception:  # a class that only the child has
            told = pickle.dumps(("warning", (str(message), UserWarning, filename, line)))
        sender.send_bytes(told)

    logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]
    warnings.showwarning = show  # type: ignore[assignment]


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a record that are plain values."""
    return {name: value for name, value in attributes.items() if isinstance(value, str | int | float | None)}
