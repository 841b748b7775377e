"""Lets a trace decide what a model's own code compares of sizes, where an operator takes a plain bool alone.

``is_causal=q.shape[1] > 1`` is a symbolic bool in a trace, which a function of torch refuses. An ``if`` would have
decided it, and would have put a condition on the sizes. So does this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["asks_for_a_bool", "deciding_comparisons"]

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_LIBRARY = ("torch", "sympy")  # their own comparisons must not put conditions on sizes


def asks_for_a_bool(error: Exception) -> bool:
    """Whether a function of torch has refused a symbolic bool."""
    return isinstance(error, TypeError) and "not SymBool" in str(error)


@contextmanager
def deciding_comparisons() -> Iterator[None]:
    """Comparisons of sizes in a model's own code are decided by the traced batch, which becomes a condition."""
    with ExitStack() as patched:
        for name in _COMPARISONS:
            patched.enter_context(patch.object(torch.SymInt, name, _deciding(getattr(torch.SymInt, name))))
        yield


def _deciding(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(one: Any, other: Any) -> Any:
        made = own(one, other)
        asking = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if asking in _LIBRARY or not isinstance(made, torch.SymBool):
            return made
        try:
            return bool(made)
        except Exception:  # a size that depends on values cannot be decided
            return made

    return compare
