"""What the code of a traced model asked about the sizes of its input: ``if x.shape[1] > 5`` has one answer in a trace.

A batch for which the answer is another one would need another trace. Without a check it would be computed wrongly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Conditions", "conditions_of"]

_LEAST = 2  # torch takes 0 and 1 for constants: of these sizes, no condition tells what was asked


@dataclass(frozen=True)
class Conditions:
    """The answers in a trace.

    Args:
        ranges: the least and the largest size of an axis, by the name of its symbol.
        comparisons: expressions of ``L``, the arguments of the model's forward by their names.
        signature: the arguments of the model's forward.
    """

    ranges: Mapping[str, tuple[float, float]]
    comparisons: tuple[str, ...]
    signature: inspect.Signature

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Refuse an input for which the model's code would go another way.

        Args:
            args, kwargs: the arguments of the model's forward.
            sizes: the size of each symbol.

        Raises:
            ValueError: a size does not meet a condition.
        """
        for symbol, (least, most) in self.ranges.items():
            size = sizes.get(symbol)
            if size is not None and not least <= size <= most:
                raise _another_way(f"a size between {least:g} and {most:g}", f"{size}")
        arguments = self.signature.bind(*args, **kwargs).arguments
        given = {"L": arguments, "math": math}
        for comparison in self.comparisons:
            if not _holds(comparison, given):
                shown = comparison.replace("L['", "").replace("']", "")
                shapes = {name: tuple(v.shape) for name, v in arguments.items() if isinstance(v, torch.Tensor)}
                raise _another_way(shown, f"{shapes}")


def _another_way(asked: str, found: str) -> ValueError:
    return ValueError(f"the model's code asked about sizes, and its trace holds for {asked} alone, got {found}")


def _holds(comparison: str, given: Mapping[str, Any]) -> bool:
    try:
        return bool(eval(comparison, {"__builtins__": {}}, dict(given)))  # noqa: S307  # torch has written it
    except Exception:  # what torch's own functions would say cannot be asked here
        return True


def conditions_of(exported: Any, model: nn.Module) -> Conditions:
    """The conditions of an exported program of ``model``; those that every size of two and more meets are left out."""
    ranges = {
        str(symbol): (float(bounds.lower), float(bounds.upper))
        for symbol, bounds in exported.range_constraints.items()
        if float(bounds.lower) > _LEAST or not math.isinf(_upper(bounds))
    }
    comparisons = tuple(getattr(exported, "_guards_code", None) or ())  # without them, ranges are all that is known
    return Conditions(ranges, comparisons, inspect.signature(model.forward))


def _upper(bounds: Any) -> float:
    try:
        return float(bounds.upper)
    except (TypeError, ValueError, OverflowError):  # torch's own infinity of whole numbers
        return math.inf
