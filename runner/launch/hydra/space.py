"""The search space of a study: the overrides with several values, as questions to an Optuna trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runner.errors import Problem, RequestError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna.trial import Trial

__all__ = ["Dimension", "choices_of", "space_of", "split_searched"]

Dimension = Callable[["Trial"], Any]
"""Asks a trial for the value of one key."""


def split_searched(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with several values, and the other words."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    searched = []
    for word in words:
        try:
            if parser.parse_override(word).is_sweep_override():
                searched.append(word)
        except HydraException:
            continue  # reported with the other problems when the request is resolved
    return searched, [word for word in words if word not in searched]


def space_of(words: Sequence[str]) -> dict[str, Dimension]:
    """The dimensions of a search, by key.

    Args:
        words: overrides with several values: ``choice(a,b)``, ``a,b``, ``range(0,8,2)``, ``interval(0.1,1)``, and
            ``tag(log, interval(1e-5,1e-2))`` on a logarithmic scale.

    Raises:
        RequestError: an override cannot be searched.
    """
    return {key: _dimension(override) for key, override in _parsed(words).items()}


def choices_of(words: Sequence[str]) -> dict[str, list[Any]]:
    """All values of each key, which a search over a grid asks for.

    Raises:
        RequestError: a key has no finite number of values.
    """
    return {key: _values(override) for key, override in _parsed(words).items()}


def _parsed(words: Sequence[str]) -> dict[str, Override]:
    """The overrides by key; the last one of a key counts."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return {one.get_key_element(): one for one in OverridesParser.create().parse_overrides(list(words))}


def _dimension(override: Override) -> Dimension:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return _interval(key, value.start, value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle:
        return _steps(key, _values(override))
    choices = _values(override)
    return lambda trial: trial.suggest_categorical(key, choices)


def _values(override: Override) -> list[Any]:
    from hydra.core.override_parser.types import IntervalSweep, Transformer

    if isinstance(override.value(), IntervalSweep):
        why = "A grid has a value at each of its points, and an interval has no points"
        fix = f"{override.get_key_element()}=choice(…)"
        raise RequestError([Problem("hydra.sweeper.sampler", "grid", "needs values that can be counted", why, fix)])
    return list(override.sweep_iterator(transformer=Transformer.encode))


def _interval(key: str, low: Any, high: Any, *, log: bool) -> Dimension:
    if isinstance(low, int) and isinstance(high, int):
        return lambda trial: trial.suggest_int(key, low, high, log=log)
    return lambda trial: trial.suggest_float(key, float(low), float(high), log=log)


def _steps(key: str, values: Sequence[Any]) -> Dimension:
    """The values of a range, of which each is as near to the next one as all others."""
    if len(values) < 2:
        return lambda trial: trial.suggest_categorical(key, list(values))
    step = values[1] - values[0]
    low, high = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return lambda trial: trial.suggest_int(key, low, high, step=abs(step))
    return lambda trial: trial.suggest_float(key, float(low), float(high), step=abs(float(step)))
