"""What K-FAC's work takes of a stage: seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from runner.profile import FactorProfile, LayerProfile

__all__ = ["CurvatureRanges", "StageCurvature"]

_ELEMENT = 4  # bytes: factors are fp32
_TEMPORARIES = 2  # of a factor's size: what is factorised, and the new inverse beside the old one


@dataclass(frozen=True, slots=True)
class StageCurvature:
    """Of a stage's layers and one micro-batch. Pairs are of inputs and of output gradients.

    Args:
        sum_seconds: of one micro-batch's sums.
        inversion_seconds: of the inversions.
        kept_bytes: of what is summed.
        inversion_bytes: most temporaries of an inversion.
    """

    sum_seconds: tuple[float, float] = (0.0, 0.0)
    inversion_seconds: tuple[float, float] = (0.0, 0.0)
    kept_bytes: tuple[int, int] = (0, 0)
    inversion_bytes: int = 0


class CurvatureRanges:
    """Of any contiguous range of layers, in constant time but for the largest factor."""

    def __init__(self, chain: Sequence[LayerProfile]) -> None:
        self._factors = [layer.factors for layer in chain]
        self._any = any(self._factors)
        self._sums = self._pair(lambda factor: factor.sum_seconds)
        self._inversions = self._pair(lambda factor: factor.inversion_seconds)
        self._kept = self._pair(lambda factor: float(factor.kept_bytes))

    def of(self, first: int, end: int) -> StageCurvature:
        """Of layers first .. end-1."""
        if not self._any:
            return StageCurvature()
        sizes = [factor.size for factors in self._factors[first:end] for factor in factors]

        def over(pair: tuple[list[float], list[float]]) -> tuple[float, float]:
            return pair[0][end] - pair[0][first], pair[1][end] - pair[1][first]

        kept = over(self._kept)
        return StageCurvature(
            sum_seconds=over(self._sums),
            inversion_seconds=over(self._inversions),
            kept_bytes=(round(kept[0]), round(kept[1])),
            inversion_bytes=_TEMPORARIES * _ELEMENT * max(sizes, default=0) ** 2,
        )

    def _pair(self, figure: Callable[[FactorProfile], float]) -> tuple[list[float], list[float]]:
        """Prefix sums over the layers, of inputs and of output gradients."""

        def sums(of_inputs: bool) -> list[float]:
            return list(accumulate((_total(factors, of_inputs, figure) for factors in self._factors), initial=0.0))

        return sums(True), sums(False)


def _total(factors: Iterable[FactorProfile], of_inputs: bool, figure: Callable[[FactorProfile], float]) -> float:
    return sum(figure(factor) for factor in factors if factor.of_inputs == of_inputs)
