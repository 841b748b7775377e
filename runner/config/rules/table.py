"""Tables of rules: what must hold of a request, said once for the check, for ``runner plan --rules`` and for the docs.

A rule reads *facts*: a value with all that it may ask about. The rules of the configuration read the
:class:`~runner.config.schema.RunConfig` itself; those of the plan read that and the traits of the schedule
(:mod:`runner.plan.rules.facts`). To add a rule is to add one :class:`Row` to a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from string import Formatter
from typing import Any, Generic, TypeVar

from typing_extensions import override

from runner.errors import Problem

__all__ = ["OWN", "Computed", "Row", "Rule", "Table", "filled", "value_at", "where", "worded"]

OWN = "the runner"
"""The source of a rule that nobody else states."""

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Row(Generic[Facts]):
    """A rule that is broken or not, with the words for it.

    ``rule``, ``why`` and ``fix`` may name facts in braces: ``{optimizer.name}`` becomes ``adamw``.

    Args:
        path: the key that is refused, as an override names it. A section's path stands for its option's name.
        breaks: whether the facts break the rule.
        rule: what must hold, after ``<key> = <value>:``.
        why: the reason.
        source: where the reason can be read; the runner's own rules need none.
        fix: an override that would do, or what makes one of the facts.
        value: what of the facts is shown as refused; default: the value at ``path``.
        when: whether the rule is about these facts at all; default: always. ``breaks`` may rely on it.
    """

    path: str
    breaks: Callable[[Facts], bool]
    rule: str
    why: str = ""
    source: str = OWN
    fix: str | Callable[[Facts], str] = ""
    value: Callable[[Facts], object] | None = None
    when: Callable[[Facts], bool] | None = None

    def problems(self, facts: Facts) -> Iterator[Problem]:
        """One problem where the facts break the rule."""
        if (self.when is None or self.when(facts)) and self.breaks(facts):
            value = value_at(facts, self.path) if self.value is None else self.value(facts)
            fix = filled(self.fix, facts) if isinstance(self.fix, str) else self.fix(facts)
            yield Problem(self.path, value, filled(self.rule, facts), filled(self.why, facts), fix)


@dataclass(frozen=True)
class Computed(Generic[Facts]):
    """A rule that is a function, because it finds several problems at once or computes their words.

    Args:
        path: the key or keys that it refuses.
        problems: finds every problem.
        rule: what must hold, in words for a reader of the table.
        why: the reason.
        source: where the reason can be read.
    """

    path: str
    problems: Callable[[Facts], Iterable[Problem]]
    rule: str
    why: str = ""
    source: str = OWN


Rule = Row[Facts] | Computed[Facts]


@dataclass(frozen=True)
class Table(Generic[Facts]):
    """Rules that belong together, in the order in which they are checked.

    Args:
        title: what they are about; where ``applies`` is given, it says when they apply.
        rules: the rules.
        applies: whether the table is looked at for these facts; default: always.
        first_of_each_key: of several broken rules with one path only the first is told.
        cites: problems name the rule's source after its reason.
    """

    title: str
    rules: tuple[Rule[Facts], ...]
    applies: Callable[[Facts], bool] | None = None
    first_of_each_key: bool = False
    cites: bool = False

    def problems(self, facts: Facts) -> Iterator[Problem]:
        """Every rule of the table that the facts break."""
        if self.applies is not None and not self.applies(facts):
            return
        told: set[str] = set()
        for rule in self.rules:
            if self.first_of_each_key and rule.path in told:
                continue
            for problem in rule.problems(facts):
                told.add(rule.path)
                yield replace(problem, why=f"{problem.why} ({rule.source})") if self.cites else problem


def where(condition: Callable[[Facts], bool], *rows: Row[Facts]) -> tuple[Row[Facts], ...]:
    """The same rows, which are about facts that meet a condition and no others."""
    return tuple(replace(row, when=condition if row.when is None else _both(condition, row.when)) for row in rows)


def _both(first: Callable[[Facts], bool], second: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda facts: first(facts) and second(facts)


def worded(path: str, rule: str, why: str, source: str) -> str:
    """A rule in one line; the runner's own need no source."""
    reason = f" {why}" if why else ""
    return f"{path}: {rule}.{reason}" + (f" ({source})" if source != OWN else "")


def value_at(facts: object, path: str) -> Any:
    """The value of a key of the request; of a section, the name of its option."""
    value = getattr(facts, "config", facts)
    for key in path.split("."):
        value = getattr(value, key)
    return getattr(value, "name", value) if is_dataclass(value) else value


class _Words(Formatter):
    """Fills in facts, with null, true and false as overrides write them."""

    def __init__(self, facts: object) -> None:
        self._facts = facts

    @override
    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return getattr(self._facts, str(key))

    @override
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        return str(value)


def filled(text: str, facts: object) -> str:
    """``text`` with the facts that it names in braces."""
    return _Words(facts).vformat(text, (), {}) if "{" in text else text
