"""Parses a command line into the flags of a command and the override words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import Problem, did_you_mean

__all__ = ["Arguments", "Command", "Flag", "parse"]


_HYDRAS_COMPLETION = ("--shell-completion", "-sc")


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a command; ``value`` names the argument that follows it and is empty for a switch."""

    name: str
    summary: str
    value: str = ""
    short: str = ""

    @property
    def usage(self) -> str:
        """The flag as the help shows it."""
        names = f"{self.short}, {self.name}" if self.short else self.name
        return f"{names} {self.value}".rstrip()


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the help describes it, before the command's own module is imported.

    Args:
        summary: one line.
        usage: what follows the name on the command line.
        about: a paragraph.
        examples: whole command lines, each with what it does.
        flags: all flags except ``--help``.
        sections: sections whose keys the help lists; None for all, empty for a command without overrides.
    """

    name: str
    summary: str
    usage: str
    about: str
    examples: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...] = ()
    sections: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line.

    Args:
        flags: flags by name, without dashes; True for a switch, otherwise the flag's value.
        words: everything that is not a flag, in order.
        problems: flags that are unknown or lack their value.
    """

    flags: Mapping[str, str | bool] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def switch(self, name: str) -> bool:
        """Whether the switch was given."""
        return name in self.flags

    def value(self, name: str) -> str | None:
        """The value of the flag, or None if it was not given."""
        found = self.flags.get(name)
        return found if isinstance(found, str) else None


def parse(command: Command, line: Sequence[str]) -> Arguments:
    """Parse the words of a command. Flags may stand anywhere; ``--name=value`` works too."""
    known = {each: flag for flag in command.flags for each in (flag.name, flag.short) if each}
    flags: dict[str, str | bool] = {}
    words: list[str] = []
    problems: list[Problem] = []
    rest = deque(line)
    while rest:
        word = rest.popleft()
        if not word.startswith("-") or word == "-":
            name, equals, value = word.partition("=")
            if equals and f"--{name}" in known:
                problems.append(_flag_as_key(command, known[f"--{name}"], value))
            else:
                words.append(word)
            continue
        name, equals, inline = word.partition("=")
        flag = known.get(name)
        if flag is None:
            meant = _key_as_flag(name, inline if equals else None, rest) if _takes_keys(command, name, known) else None
            problems.append(meant or _unknown(command, name, known))
            continue
        problems += _take(flag, inline if equals else None, rest, flags)
    return Arguments(flags, tuple(words), tuple(problems))


def _take(flag: Flag, inline: str | None, rest: deque[str], flags: dict[str, str | bool]) -> list[Problem]:
    name = flag.name.lstrip("-")
    if not flag.value:
        flags[name] = True
        return [] if inline is None else [Problem(flag.name, inline, "takes no value", fix=flag.name)]
    value = inline if inline is not None else _popped(rest)
    if not value:
        return [Problem(flag.name, value, f"needs {flag.value}", fix=flag.usage)]
    flags[name] = value
    return []


def _popped(rest: deque[str]) -> str | None:
    return rest.popleft() if rest else None


def _takes_keys(command: Command, name: str, known: Mapping[str, Flag]) -> bool:
    """Whether an unknown flag may be meant as a key: not where a command has no keys, or a flag of a similar name."""
    return command.sections != () and did_you_mean(name, known) is None


def _key_as_flag(name: str, inline: str | None, rest: deque[str]) -> Problem | None:
    """The problem of a key or group that is written as a flag, which takes the word after it as its value.

    None if no key or group is meant: neither one of this name, nor a single one whose last part has it.
    """
    from runner.config.compose.shape import key_paths, type_at

    key = name.lstrip("-").replace("-", "_")
    is_value = inline is None and bool(rest) and "=" not in rest[0] and not rest[0].startswith("-")
    value = rest[0] if is_value else inline
    fix = _accepted(f"{key}={value}") if value else ""
    if not value:  # a switch
        found = [path for path in key_paths() if path.rpartition(".")[2] == key and type_at(path) is bool]
        fix = f"{found[0]}=true" if len(found) == 1 else ""
    if not fix and key not in key_paths():
        return None
    if is_value:
        rest.popleft()
    why = f"{fix.partition('=')[0] or key} is written without dashes, as KEY=VALUE"
    return Problem("flag", name, "there is no such flag", why, fix)


def _flag_as_key(command: Command, flag: Flag, value: str) -> Problem:
    """The problem of a flag that is written as a key; no key has the name of a flag."""
    fix = f"{flag.name} {value}" if flag.value else flag.name
    return Problem(flag.name.lstrip("-"), value, f"is a flag of `runner {command.name}`, and no key", fix=fix)


def _accepted(word: str) -> str:
    """The override, if the schema accepts it, or the one that its only problem advises; else empty."""
    from runner.config.compose.groups import config_roots
    from runner.config.compose.overrides import read_overrides

    problems = read_overrides([word], config_roots(Path.cwd()))[1]
    return word if not problems else problems[0].fix


def _unknown(command: Command, name: str, known: Mapping[str, Flag]) -> Problem:
    if name in _HYDRAS_COMPLETION:
        why = "A command of its own switches completion on"
        return Problem("flag", name, "there is no such flag", why, "runner completion bash")
    near = did_you_mean(name, known)
    why = f"`runner {command.name}` has {', '.join(flag.name for flag in command.flags) or 'none'}"
    return Problem("flag", name, "there is no such flag", why, near or "")
