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
        backward_bytes: most above what was alive at the start of a backward whose gradients are kept; and of one whose
            layers' inputs are kept besides.
    """

    sum_seconds: tuple[float, float] = (0.0, 0.0)
    inversion_seconds: tuple[float, float] = (0.0, 0.0)
    kept_bytes: tuple[int, int] = (0, 0)
    inversion_bytes: int = 0
    backward_bytes: tuple[int, int] = (0, 0)


class CurvatureRanges:
    """Of any contiguous range of layers.

    Args:
        chain: the layers, and the loss.
        saved: what autograd keeps of them, as prefix sums.
    """

    def __init__(self, chain: Sequence[LayerProfile], saved: Sequence[int]) -> None:
        self._chain, self._saved = chain, saved
        self._factors = [layer.factors for layer in chain]
        self._any = any(self._factors)
        self._sums = self._pair(lambda factor: factor.sum_seconds)
        self._inversions = self._pair(lambda factor: factor.inversion_seconds)
        self._kept = self._pair(lambda factor: float(factor.kept_bytes))

    def of(self, first: int, end: int, held_output_bytes: int) -> StageCurvature:
        """Of layers first .. end-1.

        Args:
            held_output_bytes: of their output, what ``saved`` counts and a backward does not free.
        """
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
            backward_bytes=(
                self._backward(first, end, held_output_bytes, inputs=False),
                self._backward(first, end, held_output_bytes, inputs=True),
            ),
            inversion_bytes=_TEMPORARIES * _ELEMENT * max(sizes, default=0) ** 2,
        )

    def _backward(self, first: int, end: int, held_output_bytes: int, *, inputs: bool) -> int:
        """Layer by layer from the last, as a stage's backward; what is kept of each stays when autograd lets go.

        What is kept of the layer that runs is in its transients for the most part.
        """
        peak, kept = 0.0, 0.0
        for at in range(end - 1, first - 1, -1):
            layer = self._chain[at]
            if at == end - 1:
                own = layer.backward_transient_bytes
            else:
                own = layer.gradient_of_output_bytes + layer.inner_backward_bytes + held_output_bytes
            peak = max(peak, kept + own - (self._saved[end] - self._saved[at + 1]))
            kept += sum(factor.kept_bytes for factor in layer.factors if inputs or not factor.of_inputs)
        return round(peak)

    def _pair(self, figure: Callable[[FactorProfile], float]) -> tuple[list[float], list[float]]:
        """Prefix sums over the layers, of inputs and of output gradients."""

        def sums(of_inputs: bool) -> list[float]:
            return list(accumulate((_total(factors, of_inputs, figure) for factors in self._factors), initial=0.0))

        return sums(True), sums(False)


def _total(factors: Iterable[FactorProfile], of_inputs: bool, figure: Callable[[FactorProfile], float]) -> float:
    return sum(figure(factor) for factor in factors if factor.of_inputs == of_inputs)
