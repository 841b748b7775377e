"""The strategies of ``offload`` that a request names: those of this package, and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from runner.config.schema import OffloadConfig
from runner.errors import Problem, RequestError
from runner.memory.solve.offload import Offload, moving
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.residency import WeightUnit
from runner.memory.solve.values import ChainProgram, StageChain
from runner.memory.solve.weight_strategy import StageUnits, WeightStrategy
from runner.memory.solve.weights import WEIGHT_STRATEGIES
from runner.targets import call_named, import_named

__all__ = ["MOVERS", "find_offload", "find_weights", "is_own", "offload_of", "target_problems", "weights_of"]

MOVERS = ("none", "save_on_cpu", *OFFLOADS)
"""The names of this package that ``offload.activations`` may have."""

_TARGET = "offload.target"
_SHIPPED = {"activations": MOVERS, "weights": ("none", *WEIGHT_STRATEGIES)}
Kind = TypeVar("Kind", bound=Offload | WeightStrategy)


def is_own(section: OffloadConfig, key: str) -> bool:
    """Whether ``activations`` or ``weights``, the key, names the user's own strategy, the one that ``target`` is."""
    return section.target is not None and key in _SHIPPED and getattr(section, key) not in _SHIPPED[key]


def offload_of(section: OffloadConfig) -> Offload | None:
    """The strategy that moves activations; None if there is none, or it is torch's own.

    A ``target`` may name an :class:`Offload`, or a function from a stage's :class:`StageChain` to the layers that move.

    Raises:
        RequestError: the target cannot be imported.
    """
    return _own(section, Offload, _of_function) if is_own(section, "activations") else OFFLOADS.get(section.activations)


def weights_of(section: OffloadConfig) -> WeightStrategy | None:
    """The strategy that says which weights are at home in the host's memory; None if there is none.

    A ``target`` may name a :class:`WeightStrategy`, or a function from a stage's :class:`StageUnits` to the units that
    move; it is asked again, with what is too much, while a rank is above ``memory_limit``.

    Raises:
        RequestError: the target cannot be imported.
    """
    if is_own(section, "weights"):
        return _own(section, WeightStrategy, _of_units)
    return WEIGHT_STRATEGIES.get(section.weights)


def find_offload(section: OffloadConfig) -> Offload | None:
    """Like :func:`offload_of`; None if that raises."""
    return _found(offload_of, section)


def find_weights(section: OffloadConfig) -> WeightStrategy | None:
    """Like :func:`weights_of`; None if that raises."""
    return _found(weights_of, section)


def target_problems(section: OffloadConfig) -> Iterator[Problem]:
    """Import the strategies that are the user's own, and return the problems of this."""
    try:
        offload_of(section), weights_of(section)
    except RequestError as error:
        yield from error.problems


def _found(of: Callable[[OffloadConfig], Kind | None], section: OffloadConfig) -> Kind | None:
    try:
        return of(section)
    except RequestError:
        return None


def _own(section: OffloadConfig, kind: type[Kind], made: Callable[[OffloadConfig, Any], Kind]) -> Kind:
    def fits(found: object) -> bool:
        return isinstance(found, kind) or (callable(found) and not isinstance(found, type))

    assert section.target is not None  # it is the user's own
    found = import_named(_TARGET, section.target, what=f"function or {kind.__name__}", fits=fits)
    name = section.activations if kind is Offload else section.weights
    return replace(found, name=name) if isinstance(found, kind) else made(section, found)


def _of_function(section: OffloadConfig, function: Any) -> Offload:
    def move(chain: StageChain, program: ChainProgram) -> ChainProgram:
        return moving(program, _chosen(section, function, chain, chain.indices, "the stage's layers"))

    return Offload(section.activations, move, about=function.__doc__ or "")


def _of_units(section: OffloadConfig, function: Any) -> WeightStrategy:
    def choose(stage: StageUnits) -> list[WeightUnit]:
        chosen = _chosen(section, function, stage, stage.units, "the stage's units")
        return [unit for unit in stage.units if unit in chosen]

    return WeightStrategy(section.weights, choose, source="", about=function.__doc__ or "", reads_budget=True)


def _chosen(
    section: OffloadConfig, function: Any, stage: StageChain | StageUnits, known: Sequence[Any], what: str
) -> Collection[Any]:
    """What a user's function chooses of a stage, all of which must be there."""
    assert section.target is not None
    made = call_named(_TARGET, section.target, function, stage, **section.kwargs)
    chosen = list(made) if isinstance(made, Iterable) else []
    if strangers := [each for each in chosen if each not in known] if isinstance(made, Iterable) else [made]:
        rule, why = f"must return a list of some of {what}", f"It returned {strangers[0]!r}"
        raise RequestError([Problem(_TARGET, section.target, rule, why)])
    return chosen
