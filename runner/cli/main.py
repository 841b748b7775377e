"""The command ``runner``: one line per mistake, a documented exit status, no traceback for a wrong request."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.cli import screen
from runner.cli.arguments import Arguments, Command, parse
from runner.cli.commands import COMMANDS
from runner.cli.streams import guard_streams
from runner.errors import (
    EXIT_FAILED,
    EXIT_OK,
    Problem,
    RequestError,
    RunnerError,
    did_you_mean,
)
from runner.late import import_late
from runner.launch.processes.leaving import leave, wait_for_threads
from runner.launch.processes.stops import end_undisturbed, exit_status_of, listen_for_stops, name_of_signal, signal_of
from runner.noise import hide_noise
from runner.printable import PrintableLines, printable
from runner.progress import heard

__all__ = ["main"]

_FULL_ERROR = "RUNNER_FULL_ERROR"
_EXIT_SECONDS = 30.0  # for exit functions of modules that a request has imported here
_HELP = {"-h", "--help"}
_ROOT = Path(__file__).parents[1]  # of the package
_TRAIN = "train"  # the command that a scheduler stops and starts again


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: the words after ``runner``; by default those of this process.
    """
    line = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process belongs to this command
        guard_streams()
        import_late()
        if line[:1] == [_TRAIN]:
            listen_for_stops()
    try:
        status = _dispatch(line)
        sys.stdout.flush()
        if argv is None:
            _end_in_time(status)
            wait_for_threads()
            leave(status)
        return status
    except RunnerError as error:
        return _explain(error)
    except KeyboardInterrupt as error:
        if argv is None:  # the process belongs to this command; a second signal must not change its status
            end_undisturbed()
        number = signal_of(error)
        meanwhile = screen.last_line()
        print(f"stopped by {name_of_signal(number)}{f' at: {meanwhile}' if meanwhile else ''}", file=sys.stderr)
        return exit_status_of(number)
    except Exception as error:  # of a user's function or of a library; the place is told, the traceback on request
        return _explain_foreign(error)


def _end_in_time(status: int) -> None:
    """End this process with its status even if functions that a user's module registered for its end do not return."""

    def end() -> None:
        time.sleep(_EXIT_SECONDS)
        print(f"exit functions did not end within {_EXIT_SECONDS:g} s, and were left", file=sys.stderr, flush=True)
        os._exit(status)

    threading.Thread(target=end, name="end in time", daemon=True).start()


def _dispatch(line: Sequence[str]) -> int:
    if not line or line[0] in _HELP or line[0] == "help":
        return _help(line[1:])
    if line[0] == "--version":
        from runner import __version__

        print(__version__)
        return EXIT_OK
    name, rest = line[0], line[1:]
    command = _command(name)
    if _HELP & set(rest):
        return _help([name])
    _log_to_standard_error()
    hide_noise()
    arguments = parse(command, rest)
    with heard(screen.under_way):
        return _runner("cfg" if arguments.switch("cfg") else name)(arguments)


def _help(names: Sequence[str]) -> int:
    """Print the help of these commands and groups, or of all commands where none is named."""
    from runner.cli.help import command_help, group_help, overview, topics

    texts = [
        group_help(name, Path.cwd())
        if name not in COMMANDS and name in topics()
        else command_help(_command(name, "help "), Path.cwd())
        for name in names
        if name not in {*_HELP, "help"}
    ]
    print("\n\n\n".join(texts) or overview())
    return EXIT_OK


def _command(name: str, before: str = "") -> Command:
    """The command called ``name``.

    Args:
        name: what was typed.
        before: what stood before it, for the advice.
    """
    found = COMMANDS.get(name)
    if found is None:
        raise RequestError([_no_command(name, before)])
    return found


def _runner(name: str) -> Callable[[Arguments], int]:
    """The ``run`` function of a module of ``cli``, imported only now because imports take most of a command's time."""
    module = importlib.import_module(f"runner.cli.{name}")
    run: Callable[[Arguments], int] = module.run
    return run


def _no_command(name: str, before: str) -> Problem:
    if before:
        return _no_topic(name, before)
    near = did_you_mean(name, COMMANDS)
    why = f"The commands are {', '.join(COMMANDS)}"
    if near is None and "=" in name:
        near = f"train {name}"
    return Problem("command", name, "there is no such command", why, f"runner {near}" if near else "")


def _no_topic(name: str, before: str) -> Problem:
    """The problem of a name that is no command, no group and no section."""
    from runner.cli.help import topics

    near = did_you_mean(name, (*COMMANDS, *topics()))
    why = f"The commands are {', '.join(COMMANDS)}"
    if near not in COMMANDS:
        why += f"; there is also help for {', '.join(sorted(topics()))}"
    return Problem("command", name, "there is no such command", why, f"runner {before}{near or ''}".strip())


def _explain(error: RunnerError) -> int:
    print(printable(str(error)), file=sys.stderr)
    if os.environ.get(_FULL_ERROR) == "1":
        traceback.print_exception(error)
    return error.exit_status


def _explain_foreign(error: Exception) -> int:
    """One line for an error that no part of the runner explains, or its traceback if the environment asks for it."""
    if os.environ.get(_FULL_ERROR) == "1":
        traceback.print_exception(error)
    if (package := _package_of_runner(error)) is not None:
        print(
            f"{package} is not installed. `pip install -e {_ROOT.parent}` installs what runner needs", file=sys.stderr
        )
        return EXIT_FAILED
    from runner.launch.failure import RankFailure

    failure = RankFailure.of(error)
    print(f"{printable(failure.summary())}. {_FULL_ERROR}=1 shows the whole traceback", file=sys.stderr)
    return failure.exit_status


def _package_of_runner(error: Exception) -> str | None:
    """The package that is missing, where the runner itself imports it: this is a clone that is not installed."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    importer = next((name for name in reversed(frames) if not name.startswith("<")), "")  # not importlib's own frames
    return error.name.partition(".")[0] if Path(importer).is_relative_to(_ROOT) else None


def _log_to_standard_error() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableLines("%(message)s"))
    log = logging.getLogger("runner")
    if not log.handlers:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
