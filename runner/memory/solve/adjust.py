"""A profile as an activation plan makes it: the same rows, with other bytes, FLOPs and seconds.

Per segment that is computed again, from layer s to layer e: from forward to backward only what its operators keep
stays, and the output of e where somebody needs it; the backward begins with a forward of the whole segment, whose saved
tensors are alive together until they are used. So the segment's peak stands in the row of layer e.

An output stays alive after its forward if its own layer saves it, if the next layer saves its input or is computed
again from it, or if it leaves the stage. Where a profile does not know, it says that it is saved.

FLOPs are counted for matrix products, convolutions and attention: a second forward's seconds go with them, where a
selective policy leaves some out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.memory.solve.values import ActivationPlan, Segment
from runner.profile import LayerProfile, ModelProfile, Recomputation

__all__ = ["adjusted", "host_bytes"]


def adjusted(profile: ModelProfile, plan: ActivationPlan) -> ModelProfile:
    """The profile with the plan's segments in it; its stages are those of the plan.

    A stage's figures from the result are those of the stage under the plan: memory, FLOPs and seconds.
    """
    rows: list[LayerProfile] = []
    loss = profile.loss
    for segments in plan.stages:
        first, last = segments[0].first, segments[-1].last
        chain = list(profile.layers[first : last + 1])
        is_last = last == len(profile.layers) - 1
        stage = _Stage(chain, loss if is_last else None, segments)
        made = stage.rows()
        if is_last:
            loss = made.pop()
        rows += _on_device(made, stage) if plan.to_host else made
    return replace(profile, layers=tuple(rows), loss=loss)


def host_bytes(before: ModelProfile, segments: Sequence[Segment]) -> int:
    """Bytes of one micro-batch's saved tensors that a stage moves to the host's memory."""
    total = 0
    for segment in segments:
        if segment.recompute:
            total += _input_bytes(before, segment.first)
            continue
        for layer in before.layers[segment.first : segment.last + 1]:
            total += _recomputation(layer, None).recomputed_bytes
    return total


def _input_bytes(profile: ModelProfile, layer: int) -> int:
    return profile.layers[layer - 1].output_bytes if layer else profile.input_bytes


class _Stage:
    """The rows of one stage, and of the loss where it is the last."""

    def __init__(self, layers: list[LayerProfile], loss: LayerProfile | None, segments: Sequence[Segment]) -> None:
        self._chain = [*layers, loss] if loss is not None else layers
        self._has_loss = loss is not None
        first = segments[0].first
        self._segments = [(each, each.first - first, each.last - first) for each in segments]
        self._starts = {start for each, start, _ in self._segments if each.recompute}  # their inputs are kept
        self._held = {  # outputs that their own segment keeps
            end
            for each, _, end in self._segments
            if each.recompute and _recomputation(self._chain[end], each.save_ops).keeps_output
        }
        self.lives = [self._is_alive(at) for at in range(len(self._chain))]

    def rows(self) -> list[LayerProfile]:
        rows: list[LayerProfile] = []
        for segment, start, end in self._segments:
            rows += self._again(segment, start, end) if segment.recompute else map(self._once, range(start, end + 1))
        return [*rows, self._once(len(self._chain) - 1)] if self._has_loss else rows

    def start_of(self, at: int) -> int:
        """The first layer that must run again for a layer's backward: itself where nothing is computed again."""
        return next((start for each, start, end in self._segments if each.recompute and start <= at <= end), at)

    def _is_alive(self, at: int) -> bool:
        """Whether a layer's output stays when the next layer has run."""
        if at == len(self._chain) - 1 or at + 1 in self._starts or at in self._held:
            return True
        return self._chain[at].saves_output or self._chain[at + 1].saves_input

    def _is_freed_before_backward(self, at: int) -> bool:
        """An output that only the layers behind it kept is gone when its own layer's backward begins."""
        return at < len(self._chain) - 1 and self.lives[at] and not self._chain[at].saves_output

    def _given(self, at: int) -> int:
        """Bytes of the input that is alive while a layer runs and that no row before has counted."""
        return self._chain[at - 1].output_bytes if at and not self.lives[at - 1] else 0

    def _once(self, at: int) -> LayerProfile:
        """A layer that keeps what autograd saves."""
        layer = self._chain[at]
        dead = 0 if self.lives[at] else layer.output_bytes
        freed = layer.output_bytes if self._is_freed_before_backward(at) else 0
        return replace(
            layer,
            saved_bytes=layer.saved_bytes - dead,
            forward_transient_bytes=layer.forward_transient_bytes + dead + self._given(at),
            backward_transient_bytes=layer.backward_transient_bytes - freed,
        )

    def _again(self, segment: Segment, start: int, end: int) -> list[LayerProfile]:
        """The layers of a segment that is run forward again in its backward."""
        rows = []
        for at in range(start, end + 1):
            layer = self._chain[at]
            figures = _recomputation(layer, segment.save_ops)
            stays = layer.output_bytes if at == end and self.lives[end] else 0
            saved = figures.kept_bytes + stays
            freed = 0 if end in self._held or end == len(self._chain) - 1 else stays
            given = self._chain[at - 1].output_bytes if at > start else self._given(start)
            share = figures.recomputed_flops / layer.forward_flops if layer.forward_flops else 1.0
            rows.append(
                replace(
                    layer,
                    saved_bytes=saved,
                    forward_transient_bytes=given + self._forward_peak(layer, figures) - saved,
                    backward_transient_bytes=self._peak_of_backward(segment, start, end) - freed if at == end else 0,
                    backward_flops=layer.backward_flops + figures.recomputed_flops,
                    backward_seconds=layer.backward_seconds + layer.forward_seconds * share,
                )
            )
        return rows

    def _forward_peak(self, layer: LayerProfile, figures: Recomputation) -> int:
        ordinary = layer.saved_bytes + layer.forward_transient_bytes
        if layer.unsaved_forward_bytes is None:
            return ordinary
        return min(ordinary, layer.unsaved_forward_bytes + figures.kept_bytes)

    def _peak_of_backward(self, segment: Segment, start: int, end: int) -> int:
        """Most above what the segment kept and the gradient of its output, while it runs again and goes back."""
        leaves = end == len(self._chain) - 1  # then the caller holds the output and its gradient
        peak = made = 0
        for at in range(start, end + 1):
            layer = self._chain[at]
            figures = _recomputation(layer, segment.save_ops)
            unsaved_output = 0 if layer.saves_output else layer.output_bytes
            ordinary = layer.saved_bytes + layer.forward_transient_bytes - figures.kept_bytes
            if at == end:  # nobody asks for the output: the second forward stops before
                done = figures.recomputed_bytes - figures.released_bytes
                running = max(done, ordinary - unsaved_output)
                return max(peak, made + running, made + done + layer.backward_transient_bytes)
            peak = max(peak, made + ordinary)
            made += figures.recomputed_bytes
            if unsaved_output and self._chain[at + 1].saves_input:
                made += unsaved_output
            own_gradient = layer.output_bytes - (0 if leaves else self._chain[end].output_bytes)
            peak = max(peak, made + own_gradient + layer.backward_transient_bytes)
        return peak


def _recomputation(layer: LayerProfile, save_ops: str | None) -> Recomputation:
    """What a second forward of a layer keeps and makes; where that is not known, nothing and everything."""
    return layer.recomputation.get(save_ops or "", Recomputation(0, layer.saved_bytes, layer.forward_flops))


def _on_device(rows: list[LayerProfile], stage: _Stage) -> list[LayerProfile]:
    """What is left on the device where saved tensors go to the host: the stage's output, and the layer that runs.

    A backward fetches a tensor when an operator asks for it: at most what its segment had saved is on the device.
    """
    left = []
    for at, row in enumerate(rows):
        stays = row.output_bytes if at == len(rows) - 1 and stage.lives[at] else 0
        gone = row.saved_bytes - stays
        before = at - 1, stage.start_of(at) - 1
        given, fetched = (rows[one].output_bytes if one >= 0 and stage.lives[one] else 0 for one in before)
        left.append(
            replace(
                row,
                saved_bytes=stays,
                forward_transient_bytes=row.forward_transient_bytes + gone + given,
                backward_transient_bytes=row.backward_transient_bytes + gone + fetched,
            )
        )
    return left
