"""``runner completion SHELL``: completes words of a command line by what the runner has, in bash and zsh.

The shell calls ``runner completion COMMAND WORD BEFORE`` with the line in ``COMP_LINE`` (bash(1), Programmable
Completion, ``complete -C``) and reads one completion per line. Bash completes only what follows the last ``=`` or
``:``, so that is what it is given. No torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from runner.cli.arguments import Arguments, Command
from runner.cli.commands import COMMANDS
from runner.config.compose.groups import config_roots, groups, options
from runner.config.compose.shape import key_paths, type_at
from runner.errors import EXIT_OK, Problem, raise_problems

__all__ = ["completions", "run", "script"]

_COMPLETE = "complete -o default -o nospace -C 'runner completion' runner"
_SCRIPTS = {"bash": _COMPLETE, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_COMPLETE}"}
_LINE, _POINT = "COMP_LINE", "COMP_POINT"
_HELP = "help"


def run(arguments: Arguments, environment: Mapping[str, str] = os.environ) -> int:
    """Print the lines that switch completion on in a shell; or, called by a shell, the completions of its line.

    Raises:
        RequestError: the shell is another one.
    """
    if _LINE in environment:
        line = environment[_LINE][: int(environment.get(_POINT) or len(environment[_LINE]))]
        print("\n".join(completions(line, arguments.words[1] if len(arguments.words) > 1 else None, Path.cwd())))
        return EXIT_OK
    raise_problems(arguments.problems)
    asked = " ".join(arguments.words)
    if asked not in _SCRIPTS:
        rule, fix = f"must be {' or '.join(_SCRIPTS)}", "runner completion bash"
        raise_problems([Problem("SHELL", asked or None, rule, fix=fix)])
    print(script(asked))
    return EXIT_OK


def script(shell: str) -> str:
    """The lines that switch completion on in ``shell``."""
    return _SCRIPTS[shell]


def completions(line: str, word: str | None, working_directory: Path) -> list[str]:
    """What the end of a line can become.

    Args:
        line: the command line up to the cursor.
        word: the end of the line that the shell replaces; None for all that follows the last blank.
        working_directory: the folder whose ``conf/`` has options, too.
    """
    *before, last = [*line.split()[1:], *([""] if line[-1:].isspace() else [])] or [""]
    kept = last[: len(last) - len(word)] if word is not None and last.endswith(word) else ""
    found = [each for each in _candidates(before, last, working_directory) if each.startswith(last)]
    return [each.removeprefix(kept) for each in found]


def _candidates(before: list[str], last: str, working_directory: Path) -> Iterable[str]:
    """Whole words; one that is complete ends with a blank."""
    if not before or before == [_HELP]:
        return [f"{name} " for name in (*COMMANDS, *([] if before else [_HELP]))]
    command = COMMANDS.get(before[0])
    if command is None:
        return []
    if last.startswith("-"):
        return [f"{flag.name} " for flag in command.flags] + ["--help "]
    if command.sections == ():
        return []
    return _overrides(command, last, working_directory)


def _overrides(command: Command, last: str, working_directory: Path) -> Iterator[str]:
    """Groups and keys; behind an equals sign the options of a group, or true and false."""
    shown = [name for name in groups() if command.sections is None or name in command.sections]
    keys = [key for key in key_paths() if command.sections is None or key.partition(".")[0] in command.sections]
    key, equals, _ = last.partition("=")
    if equals:
        values = list(options(key, config_roots(working_directory))) if key in shown else []
        values += ["true", "false"] if type_at(key) is bool else []
        yield from (f"{key}={value} " for value in values)
        return
    yield from (f"{name}=" for name in shown)
    sections = dict.fromkeys(f"{path.rpartition('.')[0]}." for path in keys if "." in path)
    yield from sections if "." not in last else ()
    yield from (f"{path}=" for path in keys if "." in last or "." not in path)
