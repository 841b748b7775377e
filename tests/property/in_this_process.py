"""Runs many requests of small models quietly; equal ones are profiled and traced once, in this process."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn
from torch._guards import detect_fake_mode

from runner.config.schema import RunConfig
from runner.errors import RunnerError
from runner.model.apart import ApartError
from runner.model.boundary import flatten
from runner.model.traced.module_structure import form_of, structure_of
from runner.model.traced.operators import Program, trace
from runner.optim.catalogue.registry import optimizer_of


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Within it, nothing is logged, and equal models are profiled and traced once."""
    with _silently(), _profiles_shared(), _traces_shared():
        yield


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _profiles_shared() -> Iterator[None]:
    """Within it, what is found on fake tensors is found in this process, without files, and once for equal models."""
    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch("runner.profiling.model.cached_profile", lambda config, make: make(config)))
        held.enter_context(mock.patch("runner.profiling.model.apart", _found_here))
        held.enter_context(mock.patch("runner.profiling.optimizer_figures.apart", _found_here))
        held.enter_context(mock.patch("runner.memory.apply.rehearse.apart", _called_here))
        yield


@contextlib.contextmanager
def _traces_shared() -> Iterator[None]:
    """Within it, layers that ranks divide are traced once where they are alike: all ranks of all runs trace them."""
    with mock.patch("runner.model.sharded.traced.trace", _traced_once):
        yield


_FOUND: dict[str, Any] = {}
_TRACED: dict[Hashable, dict[bool, Program]] = {}
_MOST_TRACED = 50


def _traced_once(model: nn.Module, inputs: Any, target: str) -> dict[bool, Program]:
    tensors, structure = flatten(inputs)
    if detect_fake_mode([*tensors, *model.parameters()]) is not None:
        return trace(model, inputs, target)
    key = structure_of(model), tuple(map(form_of, tensors)), repr(structure)
    if key not in _TRACED:
        made = trace(model, inputs, target)
        if len(_TRACED) == _MOST_TRACED:
            _TRACED.clear()
        _TRACED[key] = made
    return _TRACED[key]


def _called_here(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a child process would find out; the models of draws cannot crash this one."""
    try:
        return function(*given, **named)
    except RunnerError:
        raise
    except Exception as error:
        raise ApartError(str(error)) from error


def _found_here(function: Callable[..., Any], config: RunConfig, *given: Any, **named: Any) -> Any:
    kind = optimizer_of(config.optimizer)
    figures = kind.state_bytes, kind.values_by_axes, kind.profiler, kind.count_bytes or None
    own = kind.name if any(each is not None for each in figures) else ""
    key = repr((
        function.__name__, config.model, [len(each) for each in given], config.precision.name, config.trainer.freeze,
        config.approximate_backward, own, config.parallelism.data if kind.compresses else 0, config.compression,
        config.trainer.ema_decay is not None, replace(config.parallelism, pipeline=1, data=1),
    ))  # fmt: skip
    if key not in _FOUND:
        _FOUND[key] = _called_here(function, config, *given, **named)
    return _FOUND[key]
