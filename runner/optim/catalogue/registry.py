"""Optimizers and compressors by name: those of this package, and a user's own that an option file names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from runner.config.schema import CompressionConfig, OptimizerConfig, WeightPredictionConfig
from runner.errors import Problem, RequestError, did_you_mean
from runner.optim.catalogue import compressors, optimizers, predictions
from runner.optim.catalogue.compression import CompressionKind
from runner.optim.catalogue.found import find_kinds
from runner.optim.catalogue.kind import OptimizerKind
from runner.optim.catalogue.prediction import OwnFormula, PredictionKind
from runner.targets import call_named, import_named

__all__ = [
    "COMPRESSORS",
    "FUNCTION",
    "OPTIMIZERS",
    "PREDICTIONS",
    "compression_of",
    "find_compression",
    "find_optimizer",
    "find_prediction",
    "kind_of_class",
    "optimizer_of",
    "prediction_of_users",
    "target_problems",
]

Section = TypeVar("Section", OptimizerConfig, CompressionConfig, WeightPredictionConfig)

OPTIMIZERS: Mapping[str, OptimizerKind] = find_kinds(optimizers, OptimizerKind)
"""The optimizers of this version."""

COMPRESSORS: Mapping[str, CompressionKind] = find_kinds(compressors, CompressionKind)
"""The compressors of this version."""

PREDICTIONS: Mapping[str, PredictionKind] = find_kinds(predictions, PredictionKind)
"""The predictions of weights of this version."""

FUNCTION = "custom"
"""The name of an optimizer that is made by a user's function, which does not describe itself."""


def optimizer_of(section: OptimizerConfig) -> OptimizerKind:
    """The optimizer that the section chooses.

    A ``target`` may name an :class:`OptimizerKind`, or a function, which then makes the optimizer ``custom``.

    Raises:
        RequestError: no kind has that name, or its target cannot be imported.
    """
    shipped = OPTIMIZERS.get(section.name)
    if shipped is not None and (section.name != FUNCTION or section.target is None):
        return shipped
    if section.target is None:
        raise RequestError([Problem("optimizer.name", section.name, f"must be one of {', '.join(OPTIMIZERS)}")])
    found = _imported("optimizer.target", section.target, OptimizerKind)
    return replace(found if isinstance(found, OptimizerKind) else OPTIMIZERS[FUNCTION], name=section.name)


def compression_of(section: CompressionConfig) -> CompressionKind:
    """The compressor that the section chooses; ``target`` may name a :class:`CompressionKind`, or a reducer's maker.

    Raises:
        RequestError: no kind has that name, or its target cannot be imported, or does not take the arguments.
    """
    if section.name in COMPRESSORS:
        return COMPRESSORS[section.name]
    if section.target is None:
        raise RequestError([Problem("compression.name", section.name, f"must be one of {', '.join(COMPRESSORS)}")])
    found = _imported("compression.target", section.target, CompressionKind)
    if isinstance(found, CompressionKind):
        return replace(found, name=section.name)
    _refuse_arguments("compression", section.target, found, section.kwargs)
    return CompressionKind(name=section.name, description=found.__doc__ or "", make=partial(_call, found), keys=None)


def prediction_of_users(section: WeightPredictionConfig) -> PredictionKind:
    """The prediction that ``target`` names: a :class:`PredictionKind`, or a function of a weight's :class:`Moment`.

    Raises:
        RequestError: the target cannot be imported, or does not take the arguments.
    """
    assert section.target is not None
    assert section.name is not None  # the section names what has a target
    formula = OwnFormula(section.target, section.kwargs)
    found = formula.found()
    if isinstance(found, PredictionKind):
        return replace(found, name=section.name, predict=formula)
    _refuse_arguments("weight_prediction", section.target, found, section.kwargs)
    return PredictionKind(name=section.name, description=found.__doc__ or "", predict=formula)


def find_optimizer(section: OptimizerConfig) -> OptimizerKind | None:
    """Like :func:`optimizer_of`; if that raises: the kind ``custom`` if it has that name, None otherwise."""
    try:
        return optimizer_of(section)
    except RequestError:
        return OPTIMIZERS[FUNCTION] if section.name == FUNCTION else None


def find_compression(section: CompressionConfig) -> CompressionKind | None:
    """Like :func:`compression_of`; None if that raises."""
    try:
        return compression_of(section)
    except RequestError:
        return None


def find_prediction(section: WeightPredictionConfig) -> PredictionKind | None:
    """Like :func:`prediction_of_users`; None if that raises."""
    try:
        return prediction_of_users(section)
    except RequestError:
        return None


def kind_of_class(made: type) -> OptimizerKind | None:
    """The kind of this package that makes objects of a class or of its base class (Lightning derives classes)."""
    by_class = {name: kind for kind in OPTIMIZERS.values() for name in kind.classes}
    names = (f"{each.__module__}.{each.__qualname__}" for each in made.__mro__)
    return next((by_class[name] for name in names if name in by_class), None)


def target_problems(of: Callable[[Section], object], section: Section) -> Iterator[Problem]:
    """Import the kind that a section's target names by :func:`optimizer_of` or its like, and return the problems."""
    if section.target is None:
        return
    try:
        of(section)
    except RequestError as error:
        yield from error.problems


def _imported(path: str, target: str, kind: type) -> Any:
    def fits(found: object) -> bool:
        return isinstance(found, kind) or callable(found)

    return import_named(path, target, what=f"function or {kind.__name__}", fits=fits)


def _refuse_arguments(group: str, target: str, function: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse the ``kwargs`` of a section that are no arguments of its function, which is given one more before them."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # it is no function of Python's
        return
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:  # else a rank would be the first to call it
        rule, why = f"must be arguments of {target}", str(error).capitalize()
        fix = _nearest_argument(group, kwargs, [*signature.parameters][1:])
        raise RequestError([Problem(f"{group}.kwargs", dict(kwargs), rule, why, fix)]) from error


def _nearest_argument(group: str, kwargs: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """An override with the argument that is meant by a key which is none; empty if none is near."""
    for key, value in kwargs.items():
        near = did_you_mean(key, (name for name in arguments if name not in kwargs))
        if key not in arguments and near is not None:
            return f"{group}.kwargs.{near}={value}"
    return ""


def _call(function: Any, section: CompressionConfig, gradients: Any) -> Any:
    assert section.target is not None  # it names the function
    return call_named("compression.target", section.target, function, gradients, **section.kwargs)
