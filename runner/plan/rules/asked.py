"""Finds the rules that read a request's choices: each rule runs on facts that note which fields are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, TypeVar, cast

from runner.config.rules.sections import CONFIG_TABLES
from runner.config.rules.table import Row, Rule, Table, filled, worded
from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.plan.rules.facts import OrderFacts, RequestFacts
from runner.plan.rules.tables import ORDER_TABLES, PLACE_TABLES, SCHEDULE
from runner.profile import ModelProfile
from runner.schedule.traits import traits_of
from runner.schedule.values import Schedule

__all__ = ["AskedRule", "problems_of_keys", "rules_that_asked"]

_Facts = TypeVar("_Facts")


@dataclass(frozen=True, slots=True)
class AskedRule:
    """A rule that reads a request's choices, in words.

    Args:
        path: the key that it would refuse.
        rule: what must hold.
        why: the reason.
        source: where the reason is documented.
        read: the keys that it reads, among those that the request names.
    """

    path: str
    rule: str
    why: str
    source: str
    read: tuple[str, ...]

    def line(self) -> str:
        """The rule as one line of text."""
        return worded(self.path, self.rule, self.why, self.source)

    def to_json(self) -> dict[str, Any]:
        """The rule for a script."""
        return asdict(self)


def rules_that_asked(
    config: RunConfig, named: Collection[str], schedule: Schedule, profile: ModelProfile
) -> list[AskedRule]:
    """The rules that connect keys that a request names with other keys.

    A rule about a single key (a range, a list of known names) is left out, because it says nothing about combinations.

    Args:
        config: the request.
        named: its keys and groups, as its overrides name them; a group stands for all of its keys.
        schedule, profile: the schedule and the profile of its plan.
    """
    names = tuple(layer.name for layer in profile.layers)
    statistics = tuple(layer.name for layer in profile.layers if layer.has_running_statistics)
    request = RequestFacts(config, names)
    tensors = profile.odd_weights, profile.changed_buffers, profile.shared_buffers, profile.changed_states
    order = OrderFacts(config, traits_of(schedule), len(names), statistics, *tensors)
    return [
        *_asked(CONFIG_TABLES, config, named),
        *_asked((SCHEDULE,), request, named),
        *_asked(ORDER_TABLES, order, named),
        *_asked(PLACE_TABLES, request, named),
    ]


def problems_of_keys(config: RunConfig, named: Collection[str]) -> list[Problem]:
    """Problems that the rules of the configuration find, by the rules alone that read no other keys than these.

    They hold whatever the other keys are, so that they can be told although another part of the request is wrong.

    Args:
        config: a request.
        named: keys and groups; a group stands for all of its keys.
    """
    return [
        problem
        for table in CONFIG_TABLES
        for rule in table.rules
        if all(_is_named(key, named) for key in _read_by(rule, table, config))
        for problem in replace(table, rules=(rule,)).problems(config)
    ]


def _asked(tables: Iterable[Table[_Facts]], facts: _Facts, named: Collection[str]) -> Iterator[AskedRule]:
    for table in tables:
        for rule in table.rules:
            keys = _read_by(rule, table, facts)
            read = tuple(sorted(key for key in keys if _is_named(key, named)))
            if read and len(keys) > 1:
                yield AskedRule(rule.path, filled(rule.rule, facts), filled(rule.why, facts), rule.source, read)


def _is_named(key: str, named: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in named)


def _read_by(rule: Rule[_Facts], table: Table[_Facts], facts: _Facts) -> set[str]:
    """The keys of the request that a rule reads with these facts; none if the rule does not apply to them.

    A property of the schedule counts as the schedule's name.
    """
    seen = {rule.path}
    noted = cast(_Facts, _Noted(facts, "", seen))
    conditions = (table.applies, rule.when if isinstance(rule, Row) else None)
    if not all(condition is None or condition(noted) for condition in conditions):
        return set()
    list(rule.problems(noted))
    keys = {key.removeprefix("config.") for key in seen}
    return {"schedule.name" if key.startswith("order.") else key for key in keys}


class _Noted:
    """Wraps a value and notes the paths of the fields that are read from it."""

    def __init__(self, value: object, path: str, seen: set[str]) -> None:
        self._value, self._path, self._seen = value, path, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        path = f"{self._path}.{name}" if self._path else name
        if is_dataclass(value):
            return _Noted(value, path, self._seen)
        self._seen.add(path)
        return value
