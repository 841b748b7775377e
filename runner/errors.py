"""Errors, each with the exit status that reports it to a shell.

A :class:`Problem` is one rule that a request breaks. Rules return lists of problems, so that a user sees every mistake
of a request at once; only the outermost caller turns a list into an exception.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.printable import printable_line

__all__ = [
    "DoesNotFitError",
    "EXIT_DIFFERENT",
    "EXIT_DOES_NOT_FIT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_PREEMPTED",
    "EXIT_WRONG_REQUEST",
    "Problem",
    "RequestError",
    "RunFailedError",
    "RunnerError",
    "did_you_mean",
    "override_word",
    "raise_problems",
    "typed_word",
]

_UNQUOTED = re.compile(r"[\w.+-]*/[\w./+-]*|[a-z][\w.+-]*", re.ASCII | re.IGNORECASE)  # a text in Hydra's grammar
_NO_TEXT = ("null", "true", "false", "nan", "inf")
_LETTERS_PER_SLIP = 4
_MOST_OF_A_VALUE = 8  # problems that are told

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_DOES_NOT_FIT = 3
EXIT_DIFFERENT = 4
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

_FIRST_WORDS = {"a", "an", "each", "every", "it", "its", "no", "the", "there", "they", "this"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule of a request, and how to fix it.

    Args:
        path: the field, as an override names it, e.g. ``schedule.microbatches``.
        value: what was requested, as it is printed.
        rule: what the field must satisfy.
        why: the reason, with its source if the rule comes from somewhere else.
        fix: an exact override (or several, separated by spaces) that would work; may be empty.
    """

    path: str
    value: object
    rule: str
    why: str = ""
    fix: str = ""

    def line(self) -> str:
        """``<path> = <value>: <rule>. <why>. Try <override>.`` in one line that a terminal only shows."""
        parts = [f"{self.path} = {_shown(self.value)}: {self.rule.rstrip('.')}."]
        if self.why:
            parts.append(f"{_sentence(self.why.rstrip('.'))}.")
        if self.fix:
            parts.append(f"Try {self.fix}.")
        return printable_line(" ".join(" ".join(parts).split()))


def _sentence(why: str) -> str:
    """``why`` with a capital if it begins with a word of plain English: names of options and functions have none."""
    return why[0].upper() + why[1:] if why.split(" ", 1)[0] in _FIRST_WORDS else why


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


class RunnerError(Exception):
    """Base class of all errors that the runner explains itself. ``exit_status`` becomes the command's."""

    exit_status = EXIT_FAILED


class RequestError(RunnerError):
    """The request is wrong: configuration, file or combination. Contains every problem found."""

    exit_status = EXIT_WRONG_REQUEST

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(_lines(self.problems)))

    def __reduce__(self) -> tuple[Any, ...]:
        """So that another process can raise it with its problems."""
        return RequestError, (self.problems,)


def _lines(problems: Sequence[Problem]) -> list[str]:
    """The problems as lines. Of one value's many problems, such as those of a schedule's file, only the first ones."""
    lines: list[str] = []
    counts = Counter((problem.path, _shown(problem.value)) for problem in problems)
    seen: Counter[tuple[str, str]] = Counter()
    for problem in problems:
        of = (problem.path, _shown(problem.value))
        seen[of] += 1
        if seen[of] <= _MOST_OF_A_VALUE:
            lines.append(problem.line())
        elif seen[of] == counts[of]:
            left = counts[of] - _MOST_OF_A_VALUE
            lines.append(printable_line(f"{of[0]} = {of[1]}: and {left} more problem{'s' * (left > 1)}."))
    return lines


class DoesNotFitError(RunnerError):
    """The run would not fit into memory, or did not; the message names the rank, the part and a remedy.

    Args:
        message: the lines.
        problems: what a plan says; empty if the run had begun.
    """

    exit_status = EXIT_DOES_NOT_FIT

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message)


class RunFailedError(RunnerError):
    """A valid request whose run failed."""

    exit_status = EXIT_FAILED


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one :class:`RequestError` with all problems; return if there are none."""
    found = list(problems)
    if found:
        raise RequestError(found)


def override_word(key: str, value: object) -> str:
    """The override that gives a key a text, with Hydra's quotes where its grammar would read something else."""
    text = str(value)
    if _UNQUOTED.fullmatch(text) and text.lower() not in _NO_TEXT:
        return f"{key}={text}"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    ending = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'{key}="{ending}"'


def typed_word(key: str, value: object) -> str:
    """The same as it is typed in a shell, which takes a level of quotes away."""
    return shlex.quote(override_word(key, value))


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The known name of which ``name`` is a slip of the keyboard, or the first words; None if none is, or several are.

    A slip leaves out, adds or changes a letter, or exchanges two neighbours; one is admitted for every four letters of
    the longer name.
    Names that merely look alike (``max_epochs`` and ``max_steps``) mean different things, and so do short names of
    which one letter differs (``gpu`` and ``cpu``), and so do ``min`` and ``max``. Case and dashes do not count.
    """
    change = 1 if len(name) >= _LETTERS_PER_SLIP else len(name) + 1
    opposite = {"min": "max", "max": "min"}
    meant = _plain(name)
    other = "_".join(opposite.get(word, word) for word in meant.split("_"))
    like = [each for each in known if _plain(each) != other or other == meant]
    slips = {each: _slips(_plain(name), _plain(each), change) for each in like}
    most = {each: max(1, max(len(name), len(each)) // _LETTERS_PER_SLIP) for each in like}
    near = {each: count for each, count in slips.items() if count <= most[each]}
    nearest = [each for each, count in near.items() if count == min(near.values())]
    if not near and len(name) >= _LETTERS_PER_SLIP:
        nearest = [each for each in like if _plain(each).startswith(f"{meant}_")]
    return nearest[0] if len(nearest) == 1 else None


def _plain(name: str) -> str:
    return name.casefold().replace("-", "_")


def _slips(first: str, second: str, change: int) -> int:
    """The optimal string alignment distance: letters left out, added, exchanged with a neighbour, or changed.

    Args:
        change: what a changed letter counts; each of the others counts 1.
    """
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(second, start=1):
            ways = [before[j] + 1, row[j - 1] + 1, before[j - 1] + change * (letter != other)]
            if i > 1 and j > 1 and letter == second[j - 2] and other == first[i - 2]:
                ways.append(earlier[j - 2] + 1)
            row.append(min(ways))
    return row[-1]
