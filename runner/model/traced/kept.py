"""Keeps traces for a while: a model that is made several times, for example for several plans, is traced once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from runner.model.traced.operators import Program

__all__ = ["kept_or_traced", "keeping_traces"]

_KEPT: ContextVar[dict[Hashable, tuple[dict[bool, Program], Any]] | None] = ContextVar("kept traces", default=None)


@contextmanager
def keeping_traces() -> Iterator[None]:
    """Keep the traces that are made in the block.

    All models that are traced in it are the same one.
    """
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_or_traced(key: Hashable, holds: Any, trace: Callable[[], dict[bool, Program]]) -> dict[bool, Program]:
    """What a trace of the model has given before, or gives now.

    Args:
        key: tells the forms apart in which the model is traced, and the modes of fake tensors of which it is.
        holds: what the operators of the trace refer to by name, which lives as long as the trace.
        trace: makes the trace.
    """
    kept = _KEPT.get()
    if kept is None:
        return trace()
    if key not in kept:
        kept[key] = trace(), holds
    return kept[key][0]
