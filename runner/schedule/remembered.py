"""Computes what follows from a schedule or program alone once for each, because a plan asks for it many times."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

__all__ = ["Remembering", "remembered"]

View = TypeVar("View", bound="Remembering")
Given = ParamSpec("Given")
Result = TypeVar("Result")

_KNOWN = "_known"


class Remembering:
    """A base class of immutable values that keep what has been computed of them, in this process and as long as they
    live; copies in files and in other processes compute it again."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _KNOWN}


def remembered(function: Callable[Concatenate[View, Given], Result]) -> Callable[Concatenate[View, Given], Result]:
    """Call ``function`` once for each view and each set of further arguments, which must be hashable.

    Its result must not be changed by anyone.
    """

    @wraps(function)
    def known(view: View, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        results: dict[Any, Result] = vars(view).setdefault(_KNOWN, {})
        key = function, args, tuple(kwargs.items())
        if key not in results:
            results[key] = function(view, *args, **kwargs)
        return results[key]

    return cast("Callable[Concatenate[View, Given], Result]", known)
