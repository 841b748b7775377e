"""Tables of rules that a request must fulfil; the check, ``runner plan --rules`` and the docs are made from them.

A rule reads *facts*, an object that holds everything that the rule may need. The rules of the configuration read the
:class:`~runner.config.schema.RunConfig` itself; those of the plan read it and the properties of the schedule
(:mod:`runner.plan.rules.facts`). To add a rule is to add one :class:`Row` to a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from string import Formatter
from typing import Any, Generic, TypeVar

from typing_extensions import override

from runner.errors import Problem

__all__ = ["OWN", "Computed", "Row", "Rule", "Table", "filled", "value_at", "where", "worded"]

OWN = "the runner"
"""The source of a rule that comes from this package."""

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Row(Generic[Facts]):
    """A rule with a single condition, and its texts.

    ``rule``, ``why`` and ``fix`` may name facts in braces: ``{optimizer.name}`` becomes ``adamw``.

    Args:
        path: the key that is refused, as an override names it. The path of a section means the name of its option.
        breaks: whether the facts break the rule.
        rule: what must hold, after ``<key> = <value>:``.
        why: the reason.
        source: where the reason is documented; the runner's own rules need none.
        fix: an override that meets the rule, or a function that makes one from the facts.
        value: returns the refused value that the problem shows; default: the value at ``path``.
        when: whether the rule applies to these facts; default: always. ``breaks`` may rely on it.
        is_owned: whether nothing reads the key where the rule applies, so that only its default is not refused.
    """

    path: str
    breaks: Callable[[Facts], bool]
    rule: str
    why: str = ""
    source: str = OWN
    fix: str | Callable[[Facts], str] = ""
    value: Callable[[Facts], object] | None = None
    when: Callable[[Facts], bool] | None = None
    is_owned: bool = False

    def problems(self, facts: Facts) -> Iterator[Problem]:
        """Yield one problem if the facts break the rule."""
        if (self.when is None or self.when(facts)) and self.breaks(facts):
            value = value_at(facts, self.path) if self.value is None else self.value(facts)
            fix = filled(self.fix, facts) if isinstance(self.fix, str) else self.fix(facts)
            yield Problem(self.path, value, filled(self.rule, facts), filled(self.why, facts), fix)


@dataclass(frozen=True)
class Computed(Generic[Facts]):
    """A rule that is a function, because it finds several problems at once or computes their texts.

    Args:
        path: the key or keys that it refuses.
        problems: finds every problem.
        rule: what must hold, in words for a reader of the table.
        why: the reason.
        source: where the reason is documented.
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
        title: their topic; if ``applies`` is given, it says when they apply.
        rules: the rules.
        applies: whether the table is checked for these facts; default: always.
        first_of_each_key: whether only the first of several broken rules with one path is reported.
        cites: whether problems name the rule's source after its reason.
    """

    title: str
    rules: tuple[Rule[Facts], ...]
    applies: Callable[[Facts], bool] | None = None
    first_of_each_key: bool = False
    cites: bool = False

    def problems(self, facts: Facts) -> Iterator[Problem]:
        """A problem for every rule of the table that the facts break."""
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
    """The same rows, which apply only to facts that meet a condition."""
    return tuple(replace(row, when=condition if row.when is None else _both(condition, row.when)) for row in rows)


def _both(first: Callable[[Facts], bool], second: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda facts: first(facts) and second(facts)


def worded(path: str, rule: str, why: str, source: str) -> str:
    """A rule as one line; the runner's own rules name no source."""
    reason = f" {why}" if why else ""
    return f"{path}: {rule}.{reason}" + (f" ({source})" if source != OWN else "")


def value_at(facts: object, path: str) -> Any:
    """The value of a key of the request; for a section, the name of its option; None for an argument not given."""
    value = getattr(facts, "config", facts)
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key)
    return getattr(value, "name", value) if is_dataclass(value) else value


class _Words(Formatter):
    """Fills in facts; None and booleans become null, true and false, as in overrides."""

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
    """``text`` with values for the facts that it names in braces."""
    return _Words(facts).vformat(text, (), {}) if "{" in text else text
