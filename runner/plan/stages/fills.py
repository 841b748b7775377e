"""What work that fills bubbles takes of a stage: seconds and bytes, by its kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

from runner.profile import FillProfile, LayerProfile

__all__ = ["FillRanges", "StageFills"]


@dataclass(frozen=True, slots=True)
class StageFills:
    """What this work takes of one stage, for one micro-batch, by the names of the kinds.

    Args:
        of_microbatch: whether the kind is done for each micro-batch; otherwise once for a stage.
        seconds: of one.
        kept_bytes: what one micro-batch leaves to one.
        peak_bytes: most temporaries while one runs.
        backward_bytes: of a backward that leaves something to each of these kinds: most above what was alive at its
            start.
    """

    of_microbatch: Mapping[str, bool] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    backward_bytes: Mapping[frozenset[str], int] = field(default_factory=dict)


class FillRanges:
    """Knows what this work takes of any contiguous range of layers.

    Args:
        chain: the layers, and the loss.
        saved: what autograd keeps of them, as prefix sums.
    """

    def __init__(self, chain: Sequence[LayerProfile], saved: Sequence[int]) -> None:
        self._chain, self._saved = chain, saved
        self._kinds = {fill.kind: fill.of_microbatch for layer in chain for fill in layer.fills}
        self._seconds = {kind: self._sums(kind, lambda fill: fill.seconds) for kind in self._kinds}
        self._kept = {kind: self._sums(kind, lambda fill: float(fill.kept_bytes)) for kind in self._kinds}

    def of(self, first: int, end: int, held_output_bytes: int) -> StageFills:
        """What it takes of a stage with layers first .. end-1.

        Args:
            held_output_bytes: of their output, what ``saved`` counts and a backward does not free.
        """
        if not self._kinds:
            return StageFills()
        fills = [fill for layer in self._chain[first:end] for fill in layer.fills]
        left_to = [kind for kind, of_microbatch in self._kinds.items() if of_microbatch]
        return StageFills(
            of_microbatch=self._kinds,
            seconds={kind: sums[end] - sums[first] for kind, sums in self._seconds.items()},
            kept_bytes={kind: round(sums[end] - sums[first]) for kind, sums in self._kept.items()},
            peak_bytes={
                kind: max((fill.peak_bytes for fill in fills if fill.kind == kind), default=0) for kind in self._kinds
            },
            backward_bytes={
                frozenset(kinds): self._backward(first, end, held_output_bytes, kinds) for kinds in _subsets(left_to)
            },
        )

    def _backward(self, first: int, end: int, held_output_bytes: int, kinds: Collection[str]) -> int:
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
            kept += sum(fill.kept_bytes for fill in layer.fills if fill.kind in kinds)
        return round(peak)

    def _sums(self, kind: str, figure: Callable[[FillProfile], float]) -> list[float]:
        """Prefix sums over the layers."""
        of_layers = (sum(figure(fill) for fill in layer.fills if fill.kind == kind) for layer in self._chain)
        return list(accumulate(of_layers, initial=0.0))


def _subsets(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """All subsets but the empty one. Kinds are few."""
    return [subset for count in range(1, len(kinds) + 1) for subset in combinations(kinds, count)]
