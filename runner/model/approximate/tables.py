"""Step functions that are nearest to the derivatives of activation functions, by dynamic programming.

A table of b bits has 2**b levels and the borders between them. It minimises the squared error, weighted by the density
of a standard normal distribution, over all step functions whose borders lie between the points of a grid.

Source: Novikov et al. 2023, "Few-bit Backward: Quantized Gradients of Activation Functions for Memory Footprint
Reduction". Its recurrence: the error of k levels up to point j is the least over i of the error of k - 1 levels up to
i and the error of one level from i to j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["DERIVATIVES", "StepTable", "step_table", "steps_of"]

_POINTS = 1601
_FARTHEST = 5.0  # where the density is a millionth of that of 0: beyond, sums of it would cancel

Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTable:
    """A step function.

    Args:
        borders: ascending; the first level is for x <= borders[0], the last one for x > borders[-1].
        levels: one more than borders.
        bits: bits of a level's number.
    """

    borders: tuple[float, ...]
    levels: tuple[float, ...]
    bits: int


def _normal(x: Values) -> Values:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _sigmoid(x: Values) -> Values:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: Values) -> Values:
    return np.asarray((1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2 + x * _normal(x))


def _gelu_tanh(x: Values) -> Values:
    scale = math.sqrt(2 / math.pi)
    t = np.tanh(scale * (x + 0.044715 * x**3))
    return np.asarray((1 + t) / 2 + x * (1 - t * t) / 2 * scale * (1 + 3 * 0.044715 * x * x))


def _mish(x: Values) -> Values:
    t = np.tanh(np.logaddexp(0, x))
    return np.asarray(t + x * (1 - t * t) * _sigmoid(x))


def _selu(x: Values) -> Values:
    return np.asarray(1.0507009873554805 * np.where(x > 0, 1.0, 1.6732632423543772 * np.exp(np.minimum(x, 0))))


DERIVATIVES: Mapping[str, Callable[[Values], Values]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: np.asarray(_sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "mish": _mish,
    "selu": _selu,
    "sigmoid": lambda x: np.asarray(_sigmoid(x) * (1 - _sigmoid(x))),
    "tanh": lambda x: np.asarray(1 - np.tanh(x) ** 2),
}
"""The derivatives by the names of the activation functions; relu's is a step function itself."""


@lru_cache(maxsize=64)
def step_table(activation: str, bits: int) -> StepTable:
    """The table of an activation function; that of relu is exact and has one bit."""
    if activation == "relu":
        return StepTable((0.0,), (0.0, 1.0), 1)
    points = np.linspace(-_FARTHEST, _FARTHEST, _POINTS)
    slopes, weights = DERIVATIVES[activation](points), _normal(points)
    starts, levels = steps_of(slopes, weights, 2**bits)
    borders = tuple(float(points[at - 1] + points[at]) / 2 for at in starts[1:])
    return StepTable(borders, tuple(levels), bits)


def steps_of(values: Values, weights: Values, count: int) -> tuple[Sequence[int], Sequence[float]]:
    """Divide ``values`` into ``count`` ranges, so that the weighted squared distance to their means is least.

    Args:
        values: [n].
        weights: [n], above 0.
        count: the number of ranges, at most n.

    Returns:
        the first index and the mean of each range.
    """
    n = len(values)
    sums = [np.concatenate([[0.0], np.cumsum(weights * values**power)]) for power in range(3)]

    def cost(end: int) -> Values:
        """The error of one level from each i < end to end."""
        mass, first, second = (each[end] - each[:end] for each in sums)
        error: Values = np.maximum(second - first * first / mass, 0.0)
        return error

    best = np.concatenate([[0.0], np.full(n, np.inf)])  # by the number of points that are covered
    costs = [cost(end) for end in range(1, n + 1)]
    choices = []
    for _ in range(count):
        totals = [best[: end + 1] + each for end, each in enumerate(costs)]
        choice = np.array([0, *(int(total.argmin()) for total in totals)])
        best = np.array([np.inf, *(float(total.min()) for total in totals)])
        choices.append(choice)
    ends = [n]
    for choice in reversed(choices):
        ends.insert(0, int(choice[ends[0]]))
    masses = [(sums[1][b] - sums[1][a]) / (sums[0][b] - sums[0][a]) for a, b in zip(ends, ends[1:], strict=False)]
    return ends[:-1], [float(mean) for mean in masses]
