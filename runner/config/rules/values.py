"""Rules of a single key: the range of a number, a known name, the form of a function's name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from runner.config.compose.shape import MISSING
from runner.config.rules.table import Row, value_at, where
from runner.config.schema import RunConfig
from runner.errors import did_you_mean
from runner.options import Option, shown

__all__ = [
    "TARGET",
    "another_schedule",
    "at_least",
    "belongs",
    "is_given",
    "not_negative",
    "of_own",
    "one_of",
    "optional_target",
    "positive",
    "rule_of",
    "target",
]

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The pattern of ``package.module:name``."""

# Also a class's own function: package.module:Class.function.
_CALLED = re.compile(TARGET.pattern + r"(\.[A-Za-z_]\w*)*")

_DOTTED = re.compile(r"\w+(\.\w+)+")


def at_least(path: str, least: int) -> Row[RunConfig]:
    """The rule that a whole number, if not null, is at least ``least``."""

    def breaks(config: RunConfig) -> bool:
        value = value_at(config, path)
        return value is not None and bool(value < least)

    return Row(path, breaks, f"must be at least {least}", fix=f"{path}={least}")


def positive(path: str, fix: str) -> Row[RunConfig]:
    """The rule that a number, if not null, is finite and above 0; ``fix`` is a valid value."""

    def breaks(config: RunConfig) -> bool:
        value = value_at(config, path)
        return value is not None and not (value > 0 and math.isfinite(value))

    return Row(path, breaks, "must be a finite number above 0", fix=f"{path}={fix}")


def not_negative(path: str) -> Row[RunConfig]:
    """The rule that a number is finite and not below 0."""

    def breaks(config: RunConfig) -> bool:
        value = value_at(config, path)
        return value is not None and not (value >= 0 and math.isfinite(value))

    return Row(path, breaks, "must be a finite number, 0 or above", fix=f"{path}=0")


def of_own(section: str, what: str, known: Collection[str]) -> tuple[Row[RunConfig], ...]:
    """The rules of ``target`` and ``kwargs`` of a section that may name the user's own kind.

    Args:
        section: its name.
        what: the kind, with its article.
        known: the names of the runner's own ones, which have no target.
    """
    target, kwargs, name = f"{section}.target", f"{section}.kwargs", f"{section}.name"
    return (
        Row(
            target,
            lambda c: value_at(c, name) in known,
            f"belongs to {what} of your own",
            f"{{{name}}} is one of the runner's",
            fix=f"{section}=mine",
            when=lambda c: is_given(c, target),
        ),
        Row(
            kwargs,
            lambda c: bool(value_at(c, kwargs)),
            "belong to a target",
            "No function of yours is asked",
            fix=lambda c: f"{kwargs}={{}}",  # braces in a plain text would name a fact
            when=lambda c: not is_given(c, target),
        ),
    )


def rule_of(section: str, option: Option) -> Iterator[Row[RunConfig]]:
    """The rule of the value of a key that a guest declares, if it has one."""
    path = f"{section}.{option.key}"
    if option.rule:
        yield Row(
            path,
            lambda c: option.breaks(value_at(c, path)),
            option.rule,
            option.why,
            fix=lambda c: option.fix_of(value_at(c, path), path),
            value=lambda c: shown(value_at(c, path)),
            when=lambda c: is_given(c, path),
        )


def another_schedule(option: str, why: str, breaks: Callable[[Any], bool]) -> Row[Any]:
    """The rule, on facts with ``order``, that an option's schedule has not the property that ``breaks`` finds."""
    return Row(
        "schedule.name",
        lambda f: breaks(f.order),
        f"must be another with {option}",
        why,
        fix="{order.one_copy}",
        value=lambda f: f.order.name,
    )


def one_of(path: str, known: tuple[str, ...]) -> Row[RunConfig]:
    """The rule that a name is known; the fix is the known name of which it is a slip, if there is one."""
    key = path.removesuffix(".name")

    def nearest(config: RunConfig) -> str:
        near = did_you_mean(value_at(config, path), known)
        return f"{key}={near}" if near is not None else ""

    return Row(path, lambda c: value_at(c, path) not in known, f"must be one of {', '.join(known)}", fix=nearest)


def target(path: str) -> tuple[Row[RunConfig], ...]:
    """The rules that a user's function is given, in the form ``package.module:function``."""
    example = f"{path}=package.module:function"

    def spelled(config: RunConfig) -> str:
        value: Any = value_at(config, path)
        module, _, function = value.rpartition("." if _DOTTED.fullmatch(value) else ":")
        meant = f"{module.removesuffix('.py').replace('/', '.')}:{function}"
        return f"{path}={meant}" if _CALLED.fullmatch(meant) else ""

    return (
        Row(
            path,
            lambda c: value_at(c, path) in (None, MISSING),
            "must be given",
            "The option custom calls your own function",
            fix=example,
        ),
        Row(
            path,
            lambda c: value_at(c, path) not in (None, MISSING) and _CALLED.fullmatch(value_at(c, path)) is None,
            "must be package.module:function",
            "A colon parts the module from the name",
            fix=spelled,
        ),
    )


def optional_target(path: str) -> tuple[Row[RunConfig], ...]:
    """The same rules for a key that may be null."""
    return where(lambda c: is_given(c, path), *target(path))


def belongs(
    path: str, owners: str, why: str = "", *, fix: str, when: Callable[[RunConfig], bool] | None = None
) -> Row[RunConfig]:
    """The rule that a key has its default value where nothing reads it.

    Args:
        path: the key.
        owners: what reads it.
        why, fix, when: see :class:`runner.config.rules.table.Row`.
    """
    unset = value_at(RunConfig(), path)

    def breaks(config: RunConfig) -> bool:
        return bool(value_at(config, path) != unset)

    return Row(path, breaks, f"belongs to {owners}", why, fix=fix, when=when, is_owned=True)


def is_given(config: RunConfig, path: str) -> bool:
    """Whether the key is not null."""
    return value_at(config, path) is not None
