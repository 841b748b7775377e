"""Rules of the optimizer: keys that it does not read, and the rules of each kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from runner.config.rules.table import Computed, Row, Table
from runner.config.rules.values import belongs, is_given, not_negative, positive
from runner.config.schema import OptimizerConfig, RunConfig
from runner.errors import Problem
from runner.optim.catalogue.kind import OptimizerKind
from runner.optim.catalogue.registry import FUNCTION, OPTIMIZERS, find_optimizer

__all__ = ["OPTIMIZER_TABLES"]

_MOST_OWNERS = 4
_DEFAULT = OptimizerConfig()

_NUMBERS: Table[RunConfig] = Table(
    "Optimizer",
    (
        positive("optimizer.lr", "0.001"),
        positive("optimizer.eps", "1e-8"),
        not_negative("optimizer.weight_decay"),
        Row(
            "optimizer.betas",
            lambda c: len(c.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in c.optimizer.betas),
            "must be two numbers in [0, 1)",
            fix="optimizer.betas=[0.9,0.999]",
        ),
        Row(
            "optimizer.momentum",
            lambda c: not 0 <= c.optimizer.momentum < 1,
            "must lie in [0, 1)",
            fix="optimizer.momentum=0.9",
        ),
    ),
)


def _holds(condition: Callable[[OptimizerKind], bool]) -> Callable[[RunConfig], bool]:
    """Whether the request's optimizer is known and meets the condition."""

    def holds(config: RunConfig) -> bool:
        kind = find_optimizer(config.optimizer)
        return kind is not None and condition(kind)

    return holds


def _read_by(key: str, why: str, default: str) -> Row[RunConfig]:
    """The rule that a key is set only if the optimizer reads it."""
    unread = _holds(lambda kind: key not in kind.reads)
    return belongs(f"optimizer.{key}", _owners(key), why, fix=f"optimizer.{key}={default}", when=unread)


def _owners(key: str) -> str:
    """The optimizers that read a key, in words."""
    names = [kind.name for kind in OPTIMIZERS.values() if key in kind.reads]
    if len(names) > _MOST_OWNERS:
        return "Adam and its kin"
    return f"optimizer={' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}"


def _decoupled(own: bool) -> Row[RunConfig]:
    """The rule that an optimizer with only one kind of weight decay is not asked for the other kind."""
    path, shown = "optimizer.decoupled_weight_decay", str(own).lower()
    return Row(
        path,
        lambda c: c.optimizer.decoupled_weight_decay is (not own),
        f"must be {shown} for {{optimizer.name}}",
        "{optimizer.name} knows no other weight decay",
        fix=f"{path}={shown}",
        when=_holds(lambda kind: kind.decoupled is own),
    )


_KEYS: tuple[Row[RunConfig], ...] = (
    _read_by("momentum", "It has no meaning for {optimizer.name}", "0"),
    _read_by("betas", "They have no meaning for {optimizer.name}", "[0.9,0.999]"),
    _read_by("eps", "It has no meaning for {optimizer.name}", "1e-8"),
    _read_by("freeze_step", "{optimizer.name} exchanges whole gradients at every step", "null"),
    _read_by("variance_refreshes", "{optimizer.name} has no steps that refresh the variance between others", "null"),
    _read_by("damping", "{optimizer.name} keeps no factors", "null"),
    _read_by("refresh_every", "{optimizer.name} keeps no factors", "null"),
    _decoupled(False),
    _decoupled(True),
)


def _own_tables() -> Iterator[Table[RunConfig]]:
    """The rules of this package's kinds; a table that several kinds share comes once."""
    titles = dict.fromkeys(table.title for kind in OPTIMIZERS.values() for table in kind.rules)
    tables = {table.title: table for kind in OPTIMIZERS.values() for table in kind.rules}
    yield from (replace(tables[title], applies=_holds(_has(title))) for title in titles)


def _has(title: str) -> Callable[[OptimizerKind], bool]:
    return lambda kind: any(table.title == title for table in kind.rules)


def _of_users_kind(config: RunConfig) -> Iterator[Problem]:
    kind = find_optimizer(config.optimizer)
    shipped = {table.title for each in OPTIMIZERS.values() for table in each.rules}
    for table in kind.rules if kind is not None else ():
        if table.title not in shipped:
            yield from table.problems(config)


def _of_shipped(key: str) -> Row[RunConfig]:
    return Row(
        f"optimizer.{key}",
        lambda c: bool(getattr(c.optimizer, key)),
        f"belongs to optimizer={FUNCTION}",
        "{optimizer.name} calls no function of yours",
        fix=f"optimizer={FUNCTION}",
        when=lambda c: c.optimizer.name in OPTIMIZERS and c.optimizer.name != FUNCTION,
    )


_OF_USERS: tuple[Row[RunConfig] | Computed[RunConfig], ...] = (
    _of_shipped("target"),
    _of_shipped("kwargs"),
    Row(
        "optimizer.target",
        lambda c: not is_given(c, "optimizer.target"),
        "must be given",
        f"The option {FUNCTION} calls your own function",
        fix="optimizer.target=package.module:function",
        when=lambda c: c.optimizer.name == FUNCTION,
    ),
    Computed("optimizer.*", _of_users_kind, "must be what the rules of an OptimizerKind of yours say"),
)

OPTIMIZER_TABLES: tuple[Table[RunConfig], ...] = (
    _NUMBERS,
    Table("Keys of an optimizer", _KEYS, applies=lambda c: find_optimizer(c.optimizer) is not None),
    *_own_tables(),
    Table("An optimizer of your own", _OF_USERS),
)
"""All tables of this file, in the order in which they are checked."""
