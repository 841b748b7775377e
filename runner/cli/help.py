"""Help texts, generated from what they describe: the command table, the schema and the option files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner import __version__
from runner.cli import screen
from runner.cli.arguments import Command, Flag
from runner.cli.commands import COMMANDS
from runner.config.compose.groups import config_roots, first_comment, groups, options
from runner.config.compose.keys import keys_of, sections

__all__ = ["command_help", "group_help", "overview", "topics"]

_NARROWEST = 20  # of a text beside a name
_WIDEST = 110  # longer lines are hard to read
_HELP = Flag("--help", "this text", short="-h")
_PROMISE = (
    "Name policies, one override each: how many stages and replicas, which schedule, which optimizer. The request is "
    "checked before it starts, predicted before it is paid for, and recorded so that runs compare."
)
_KEYS = "Keys, KEY=VALUE, with their defaults (null: not set; ???: an option sets it):"
_STATUS = (
    "Exit status: 0 done; 1 the run failed; 2 the request is wrong; 3 it does not fit in memory; 4 verify found a "
    "difference; 75 told to stop and resumable; 130 interrupted."
)


def overview() -> str:
    """The text that ``runner`` prints without arguments."""
    commands = "\n".join(_entry(each.name, each.summary, 11) for each in COMMANDS.values())
    examples = "\n\n".join(_example(*each.examples[0]) for each in COMMANDS.values())
    return f"""\
runner {__version__}: train large neural networks on machines you cannot change.

{_paragraph(_PROMISE)}

Usage:  runner COMMAND [KEY=VALUE ...] [GROUP=OPTION ...]

{commands}

{examples}

{_entry("runner help COMMAND", "its flags, and every key, group and option; so does runner COMMAND --help", 22)}
{_entry("runner help GROUP", "the options of a group with what they do, and its keys: runner help offload", 22)}
{_entry("RUNNER_FULL_ERROR=1", "a whole traceback where a message is not enough", 22)}

{_paragraph(_STATUS)}"""


def command_help(command: Command, working_directory: Path) -> str:
    """The text of ``runner COMMAND --help``, including the options of a ``conf/`` folder in the working directory."""
    usage = f"Usage:  runner {command.name} {command.usage}"
    parts = [screen.wrapped(f"runner {command.name}: {command.summary}", _width(), "    ")]
    parts.append(screen.wrapped(usage, _width(), " " * (usage.index(command.name) + len(command.name) + 1)))
    parts.append("\n".join(textwrap.wrap(command.about, _width())))
    parts.append("\n\n".join(_example(*each) for each in command.examples))
    parts.append("Flags:\n" + "\n".join(_entry(flag.usage, flag.summary, 18) for flag in (*command.flags, _HELP)))
    if command.sections != ():
        parts.append("Groups, GROUP=OPTION:\n\n" + "\n\n".join(_groups(command, working_directory)))
        parts.append("\n".join([_KEYS, *_keys(command.sections)]))
    return "\n\n".join(parts)


def topics() -> set[str]:
    """The groups and sections that :func:`group_help` tells of."""
    return {*groups(), *sections()}


def group_help(name: str, working_directory: Path) -> str:
    """The text of ``runner help GROUP``: its options and its keys; also of a section that has no options."""
    chosen = options(name, config_roots(working_directory)) if name in groups() else {}
    parts = [_entry(option, first_comment(found.path), 22) for option, found in chosen.items()]
    if parts:
        parts.insert(0, f"Options, {name}=OPTION:")
    keys = list(_keys((name,)))
    return "\n\n".join([*parts, *(["\n".join([_KEYS, *keys])] if keys else [])])


def _paragraph(text: str) -> str:
    return screen.wrapped(text, _width())


def _width() -> int:
    return min(_WIDEST, screen.width())


def _example(line: str, what: str) -> str:
    return f"  {line}\n      {what}"


def _entry(name: str, text: str, indent: int) -> str:
    lines = textwrap.wrap(text, max(_NARROWEST, _width() - indent - 4)) or [""]
    below = [" " * (indent + 4) + line for line in lines]
    if len(name) > indent and len(name) + len(lines[0]) + 4 > _width():
        return "\n".join([f"  {name}", *below])
    return "\n".join([f"  {name:<{indent}}  {lines[0]}".rstrip(), *below[1:]])


def _groups(command: Command, working_directory: Path) -> Iterator[str]:
    roots = config_roots(working_directory)
    for group in groups():
        if command.sections is not None and group not in command.sections:
            continue
        chosen = options(group, roots)
        entries = (_entry(f"  {name}", first_comment(option.path), 20) for name, option in chosen.items())
        yield "\n".join([f"  {group}", *entries])


def _keys(sections: Sequence[str] | None) -> Iterator[str]:
    """A line for each key of these sections; None: of all."""
    for key in keys_of(sections):
        yield _entry(f"{key.path}={key.default}", key.about, 40)
