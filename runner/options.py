"""Keys that single guests of a group read: each guest, a strategy or a schedule, declares its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import Problem

__all__ = ["Option", "about", "owners_by_key", "shown"]


@dataclass(frozen=True, slots=True)
class Option:
    """A key that a guest reads.

    Args:
        key: its name in the section.
        kind: its type as the schema writes it: ``int``, ``float``, ``str``, ``bool``, ``list[str]``, …
        about: what it means, for the help.
        example: a value as one would write it.
        rule: what a value of this type must fulfil, in words; empty = every value is allowed.
        breaks: whether a value breaks the rule.
        fix: a value to try instead of one that breaks the rule, or a whole override.
        required: whether it must be given.
        why: the reason of the rule, where the rule does not say it.
        elsewhere: why the other guests of the group have no use for it.
        legal: some legal values, from which tests draw.
        also: names that other tools have for it.
    """

    key: str
    kind: Any
    about: str
    example: str
    rule: str = ""
    breaks: Callable[[Any], bool] = lambda value: False
    fix: str | Callable[[Any], str] = ""
    required: bool = True
    why: str = ""
    elsewhere: str = ""
    legal: Sequence[object] = ()
    also: tuple[str, ...] = ()

    def fix_of(self, value: Any, path: str) -> str:
        """The override to try if ``path`` has a value that breaks the rule."""
        fix = self.fix(value) if callable(self.fix) else self.fix or self.example
        return fix if "=" in fix else f"{path}={fix}"

    def problem(self, value: Any, path: str) -> Problem | None:
        """What is wrong with a value whose type the schema does not check, as in options of a user's own guest."""
        accepted = (int, float) if self.kind is float else self.kind
        if isinstance(self.kind, type) and (
            not isinstance(value, accepted) or isinstance(value, bool) != (accepted is bool)
        ):
            return Problem(path, shown(value), f"must be of type {self.kind.__name__}", fix=f"{path}={self.example}")
        if not self.breaks(value):
            return None
        return Problem(path, shown(value), self.rule, self.why, self.fix_of(value, path))


def shown(value: object) -> object:
    """A value as an override writes it."""
    if not isinstance(value, list | tuple):
        return value
    return f"[{','.join(f'{each:g}' if isinstance(each, float) else str(each) for each in value)}]"


def owners_by_key(guests: Mapping[str, Sequence[Option]]) -> dict[str, dict[str, Option]]:
    """For each key, the option of every guest that reads it, by the guest's name.

    Args:
        guests: the options of each guest, by its name.
    """
    found: dict[str, dict[str, Option]] = {}
    for name, options in guests.items():
        for option in options:
            found.setdefault(option.key, {})[name] = option
    return found


def about(owners: Mapping[str, Option]) -> str:
    """What a key means for the guests that read it, for the help: ``zb_auto, auto: ... varuna: ...``."""
    names: dict[str, list[str]] = {}
    for name, option in owners.items():
        names.setdefault(option.about, []).append(name)
    return ". ".join(f"{', '.join(who)}: {text}" for text, who in names.items())
