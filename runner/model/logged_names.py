"""The names that a method of a LightningModule logs, read from its source without running it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.model.own_methods import brings

__all__ = ["COMPUTED", "logged_names", "not_called_notes"]


_ADVICE = "metrics.NAME=package.module:function is evaluated in every layout"
_NOT_CALLED = "is not called here, so that nothing is logged as"

COMPUTED = ("val_loss", "test_loss")
"""What the engine computes itself, whatever the steps say."""


def not_called_notes(
    module: Any, methods: Sequence[str], left_out: Mapping[str, Sequence[str]], advice: str = _ADVICE
) -> list[str]:
    """A line for each of these steps of a module that logs figures which nothing computes: the engine runs the layers.

    Args:
        module: the LightningModule.
        methods: the names of its steps.
        left_out: for a step that is traced, the names of what it logs and is not computed beside the loss.
        advice: what there is instead.
    """
    notes = []
    for method in methods:
        logs = left_out.get(method, logged_names(module, method))
        names = [name for name in logs if name not in COMPUTED]
        if names:
            said = "is traced, so that these are not logged:" if method in left_out else _NOT_CALLED
            notes.append(f"{type(module).__name__}.{method} {said} {', '.join(names)}; {advice}")
    return notes


def logged_names(module: Any, method: str) -> list[str]:
    """The names given to ``self.log`` and ``self.log_dict`` in a method, and in the methods of its own that it calls.

    A name that is computed appears as its expression. The list is empty if the class does not define the method, or if
    its source is not at hand.
    """
    return list(dict.fromkeys(_names(module, method, set())))


def _names(module: Any, method: str, seen: set[str]) -> Iterator[str]:
    if method in seen or not brings(module, method):
        return
    seen.add(method)
    for call in _calls_of_self(getattr(type(module), method)):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr in ("log", "log_dict"):
            given = [*call.args, *(word.value for word in call.keywords if word.arg in ("name", "dictionary"))]
            yield from _said(given[0]) if given else ()
        else:
            yield from _names(module, call.func.attr, seen)


def _calls_of_self(function: Any) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                yield node


def _said(given: ast.expr) -> Iterator[str]:
    if isinstance(given, ast.Constant):
        yield str(given.value)
    elif isinstance(given, ast.Dict):
        for key in given.keys:
            yield from _said(key) if key is not None else ()
    else:
        yield ast.unparse(given)
