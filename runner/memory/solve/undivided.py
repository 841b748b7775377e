"""Rows of layers whose I makes the gradients of all weights, because what autograd saved can be read only once.

So it is with layers that are run again in the backward, by a checkpoint, a graph program or a pool that drops tensors,
and with those whose saved tensors hooks send to the host. The gradients are alive until the whole stage's I has ended,
and W has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from runner.profile import LayerProfile, SplitBackward

__all__ = [
    "AGAIN",
    "BEHIND_HOOKS",
    "BackwardPeaks",
    "beside_callers",
    "undivided_peaks",
    "whole_peaks",
    "with_undivided",
]

AGAIN = "layers are run again in the backward, and what was saved of them can then be read once"
BEHIND_HOOKS = "hooks fetch what layers have saved from the host, and it can then be read once"


class BackwardPeaks(NamedTuple):
    """The peak bytes of a layer's backward, above its saved tensors and the gradient of its output.

    Args:
        alone: if the layer is its stage's last one, whose output and gradient the caller holds.
        chained: if another layer of its stage follows; None = not known.
        waiting: gradients of its weights that are alive while the layers before it run backward.
    """

    alone: int
    chained: int | None
    waiting: int

    @property
    def inner(self) -> int:
        """The peak if another layer of its stage follows, or the largest possible value if it is not known."""
        return self.alone if self.chained is None else self.chained

    def beside(self, callers: Mapping[int, int]) -> int:
        """As :attr:`inner`, or a bound if the caller holds what the layer would free: bytes by storage."""
        return min(max(self.alone, self.inner), self.inner + sum(callers.values()))


def whole_peaks(layer: LayerProfile, waiting: int = 0) -> BackwardPeaks:
    """The peaks of B, which adds the gradient of each weight to the weight's own at once.

    Args:
        layer: the layer.
        waiting: gradients of weights that later layers share with earlier ones, less those that no longer wait.
    """
    return BackwardPeaks(layer.backward_transient_bytes, layer.chained_backward_bytes, waiting)


def undivided_peaks(layer: LayerProfile, waiting: int | None = None) -> BackwardPeaks:
    """The peaks of an I that makes the gradients of all weights.

    Args:
        layer: the layer.
        waiting: the gradients that wait afterwards; None = those of all its weights.
    """
    waiting = layer.gradient_bytes if waiting is None else waiting
    alone, chained, known = layer.backward_transient_bytes, layer.inner_backward_bytes, layer.gradient_peaks
    if known is None:
        return BackwardPeaks(alone + waiting, chained + waiting, waiting)
    return BackwardPeaks(max(alone, known.keeping), max(chained, known.chained_keeping), waiting)


def beside_callers(layer: LayerProfile, callers: Mapping[int, int]) -> SplitBackward | None:
    """The figures of a layer's I, if the caller holds what the layer would free: bytes by storage."""
    split = layer.split
    if split is None or not callers:
        return split
    peaks = BackwardPeaks(split.transient_bytes, split.chained_transient_bytes, 0)
    return replace(split, chained_transient_bytes=peaks.beside(callers))


def with_undivided(
    row: LayerProfile,
    waiting_bytes: int,
    transient_bytes: int,
    chained_bytes: int | None = None,
    reason: str = AGAIN,
) -> LayerProfile:
    """The row of a layer that leaves nothing to W.

    Args:
        row: its row otherwise; its seconds of I and W are those of the layer before it is changed, and its seconds of a
            backward include what runs again.
        waiting_bytes: gradients of weights that it leaves waiting.
        transient_bytes: peak of I above its saved tensors and the gradient of its output.
        chained_bytes: the same if another layer of its stage follows; None = not known.
        reason: why, as a clause.
    """
    made = row.split_seconds[1]
    if row.split is not None:
        made += row.split.kept_share * row.backward_seconds
    return replace(
        row,
        input_gradient_seconds=row.backward_seconds,
        weight_gradient_seconds=0.0,
        split=SplitBackward(
            0,
            0,
            0,
            transient_bytes,
            kept_share=min(1.0, made / row.backward_seconds) if row.backward_seconds else 0.0,
            kept=(("its weights", reason),) if row.gradient_bytes else (),
            waiting_bytes=waiting_bytes,
            chained_transient_bytes=chained_bytes,
        ),
    )
