"""Adjusts a profile to an activation plan: the same rows, with other bytes, FLOPs and seconds.

A segment from layer s to layer e that is computed again keeps, between forward and backward, only what its chosen
operators keep, and the output of e if somebody needs it. Its backward begins with a forward of the whole segment, whose
saved tensors are alive together until they are used. So the segment's peak is in the row of layer e. It keeps copies
of its layers' running statistics as well, with which it is run again, in the row of layer s, and so do segments inside.

A segment that is run forward again by its own program keeps, in its second run, what that program keeps: the inputs of
the segments inside, which are later run a third time, and what the operators of the other layers save.

A tensor between layers stays alive after their forwards if a layer's autograd saves it, if a segment is computed again
from it, or if it leaves the stage. It counts once, in the first layer that keeps it: see :mod:`.tensors`.

FLOPs are counted for matrix products, convolutions and attention. If a selective policy leaves some of them out of the
second forward, the seconds of that forward are reduced in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runner.memory.solve.left_to_w import with_needs_of_w
from runner.memory.solve.moves import PlacedSegment, with_moves
from runner.memory.solve.program import ends, reruns
from runner.memory.solve.second_run import SecondRun, dropping_forward_bytes, recomputation
from runner.memory.solve.shared_weights import SharedGradients
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.undivided import BEHIND_HOOKS, beside_callers, whole_peaks, with_undivided
from runner.memory.solve.values import ActivationPlan, ChainProgram, PlainStage, Program, Segment, StageProgram
from runner.profile import GradientPeaks, LayerProfile, ModelProfile, Rehearsal

__all__ = ["adjusted", "host_bytes"]


def adjusted(profile: ModelProfile, plan: ActivationPlan, *, divides: bool = True) -> ModelProfile:
    """Return the profile under the plan, with the stages of the plan.

    Memory, FLOPs and seconds of a stage in the result are those of the stage under the plan.

    Args:
        profile: the model's profile.
        plan: what is kept of each stage.
        divides: whether the figures of backwards in two parts are wanted, too; without them it is faster.
    """
    rows: list[LayerProfile] = []
    loss = profile.loss
    for program in plan.stages:
        first, last = ends(program)
        chain = list(profile.layers[first : last + 1])
        is_last = last == len(profile.layers) - 1
        before = profile.layers[first - 1] if first else None
        own_loss = loss if is_last else None
        shared = SharedGradients(len(chain) + (own_loss is not None), profile.shared, first)
        if isinstance(program, StageProgram):
            assert not plan.to_host  # a rule refuses it
            made = _rows_of_its_own(before, chain, own_loss, program, shared, profile.rehearsals, divides=divides)
        else:
            made = _rows(before, chain, own_loss, program, shared, plan, divides=divides)
        if is_last:
            loss = made.pop()
        rows += made
    return replace(profile, layers=tuple(rows), loss=loss)


def _rows(
    before: LayerProfile | None,
    chain: list[LayerProfile],
    loss: LayerProfile | None,
    program: ChainProgram,
    shared: SharedGradients,
    plan: ActivationPlan,
    *,
    divides: bool,
) -> list[LayerProfile]:
    """The rows of a stage under its program, and that of the loss if the stage is the last."""
    stage = _Stage(before, chain, loss, program, shared, behind_hooks=plan.to_host, divides=divides)
    made = with_moves(stage.rows(), stage.chain, stage.tensors, stage.segments)
    leaves = plan.to_host and plan.host_apart
    return [*_on_device(made[: len(chain)], stage), *made[len(chain) :]] if leaves else made


def _rows_of_its_own(
    before: LayerProfile | None,
    chain: list[LayerProfile],
    loss: LayerProfile | None,
    program: StageProgram,
    shared: SharedGradients,
    rehearsals: Sequence[Rehearsal],
    *,
    divides: bool,
) -> list[LayerProfile]:
    """The same as :func:`_rows` for a program that makes them itself."""
    whole = (Segment(program.first, program.last),)

    def kept() -> list[LayerProfile]:
        return _Stage(before, chain, loss, whole, shared, divides=divides).rows()

    return program.rows(PlainStage(before, chain, loss, shared, kept, rehearsals))


def host_bytes(before: ModelProfile, program: Program) -> int:
    """Bytes of one micro-batch's saved tensors that a stage moves to the host's memory."""
    assert isinstance(program, tuple)  # a rule refuses it
    total = 0
    for segment in program:
        if segment.recompute:
            total += _input_bytes(before, segment.first)
            continue
        for layer in before.layers[segment.first : segment.last + 1]:
            total += recomputation(layer, None).recomputed_bytes
    return total


def _input_bytes(profile: ModelProfile, layer: int) -> int:
    return profile.layers[layer - 1].output_bytes if layer else profile.input_bytes


class _Stage:
    """Makes the rows of one stage, and the row of the loss if the stage is the last."""

    def __init__(
        self,
        before: LayerProfile | None,
        layers: list[LayerProfile],
        loss: LayerProfile | None,
        segments: Sequence[Segment],
        shared: SharedGradients,
        *,
        behind_hooks: bool = False,
        divides: bool = True,
    ) -> None:
        self._has_loss, self._divides = loss is not None, divides
        self._behind_hooks = range(len(layers)) if behind_hooks else range(0)  # layers whose saved tensors hooks send
        self._shared = shared
        first = segments[0].first
        self.segments = [PlacedSegment(each, each.first - first, each.last - first) for each in segments]
        self.tensors = StageTensors(before, [*layers, loss] if loss is not None else layers)
        chain = self.tensors.with_present_gradients(self.tensors.with_shared_gradients())
        self.chain = [shared.row(at, layer) for at, layer in enumerate(chain)]
        again = {at for each, start, end in self.segments if each.recompute for at in range(start, end + 1)}
        self._made_in_i = shared.shared_with(again.union(self._behind_hooks))
        of_b = [whole_peaks(layer, shared.left_by(at)) for at, layer in enumerate(self.chain)]
        self._second_run = SecondRun(self.chain, self.tensors, first, of_b)
        self._of_i = [shared.undivided(at, layer) for at, layer in enumerate(chain)] if divides else []
        if divides:
            self._second_run_of_i = SecondRun(self.chain, self.tensors, first, self._of_i)
        self._find_holders()

    def _find_holders(self) -> None:
        """Note what keeps the tensors between layers: autograd, a segment that starts from them, the stage's caller."""
        for segment, start, end in self.segments:
            if segment.recompute:
                self.tensors.hold_input(start)
            for at in range(start, end + 1):
                if not segment.recompute:
                    self.tensors.hold_saved(at)
                elif recomputation(self.chain[at], segment.save_ops).keeps_output:
                    self.tensors.hold_output(at)
        if self._has_loss:
            self.tensors.hold_saved(len(self.chain) - 1)
        self.tensors.hold_to_the_end()

    def rows(self) -> list[LayerProfile]:
        rows: list[LayerProfile] = []
        for segment, start, end in self.segments:
            rows += self._again(segment, start, end) if segment.recompute else map(self._once, range(start, end + 1))
        if self._has_loss:
            rows.append(self._once(len(self.chain) - 1))
        return with_needs_of_w(rows, self.tensors) if self._divides else rows

    def start_of(self, at: int) -> int:
        """The first layer that must run again for a layer's backward: the layer itself if nothing is computed again."""
        return next((start for each, start, end in self.segments if each.recompute and start <= at <= end), at)

    def _once(self, at: int) -> LayerProfile:
        """The row of a layer that keeps what autograd saves."""
        layer = self.chain[at]
        saved = layer.saved_bytes - self.tensors.made_bytes(at) + self.tensors.counted_bytes(at)
        running = self.tensors.waiting_bytes(at) + layer.saved_bytes + layer.forward_transient_bytes
        waiting, chained = self._shared.behind(at), layer.chained_backward_bytes
        if chained is not None and at < len(self.chain) - 1:
            chained = whole_peaks(layer).beside(self.tensors.callers_used(at))
        row = self._row(
            at,
            saved,
            running,
            backward_transient_bytes=layer.backward_transient_bytes + waiting,
            chained_backward_bytes=None if chained is None else chained + waiting,
            gradient_peaks=None if waiting or self.tensors.callers_used(at) else layer.gradient_peaks,
            split=beside_callers(layer, self.tensors.callers_used(at)) if self._divides else layer.split,
        )
        if not self._divides or not (self._made_in_i[at] or at in self._behind_hooks):
            return row
        return self._with_gradients_in_i(at, row)

    def _with_gradients_in_i(self, at: int, row: LayerProfile) -> LayerProfile:
        """The row of a layer of whose weights I makes whole gradients.

        It shares these weights with layers that run again, or all that it has saved is behind hooks.
        """
        layer, own = self.chain[at], self._shared.own(at, self.chain[at])
        peaks = self._of_i[at]
        chained = peaks.beside(self.tensors.callers_used(at))
        if at in self._behind_hooks:
            return with_undivided(row, own, peaks.alone, chained, BEHIND_HOOKS)
        if self._made_in_i[at] == layer.gradient_bytes or layer.split is None:
            return with_undivided(row, own, peaks.alone, chained)
        some = replace(
            layer.split, waiting_bytes=own, transient_bytes=peaks.alone, chained_transient_bytes=chained
        )  # what it leaves to W of its other weights is at most what it would leave of all
        return replace(row, split=some)

    def _again(self, segment: Segment, start: int, end: int) -> list[LayerProfile]:
        """The rows of a segment that is run forward again in its backward."""
        rows = []
        peak = self._second_run.peak(segment)
        runs = reruns(segment)
        for at in range(start, end + 1):
            layer = self.chain[at]
            figures = recomputation(layer, segment.save_ops)
            share = figures.recomputed_flops / layer.forward_flops if layer.forward_flops else 1.0
            more_seconds = layer.forward_seconds * share * runs[segment.first + at - start]
            of_weights = layer.split_seconds[1]
            copies = self._copies(segment, start) if at == start else 0
            row = self._row(
                at,
                saved_bytes=figures.kept_bytes + self.tensors.counted_bytes(at) + copies,
                running_bytes=self.tensors.waiting_bytes(at) + dropping_forward_bytes(layer, figures) + copies,
                backward_transient_bytes=peak + self._shared.behind(end) if at == end else 0,
                chained_backward_bytes=None,
                gradient_peaks=_bounds(self.chain[start : end + 1], peak) if at == end else None,
                backward_flops=layer.backward_flops + figures.recomputed_flops * runs[segment.first + at - start],
                backward_seconds=layer.backward_seconds + more_seconds,
                weight_gradient_seconds=of_weights,
                copied_bytes=copies,
            )
            rows.append(row)
        if not self._divides:
            return rows
        peaks = [0] * (end - start) + [self._second_run_of_i.peak(segment)]
        owns = (self._shared.own(at, self.chain[at]) for at in range(start, end + 1))
        return [with_undivided(row, own, of_i) for row, own, of_i in zip(rows, owns, peaks, strict=True)]

    def _copies(self, segment: Segment, start: int) -> int:
        """Bytes of the running statistics that a segment and those inside keep from their first run."""
        own = self.chain[start : start + segment.last - segment.first + 1]
        inside = (self._copies(each, start + each.first - segment.first) for each in segment.inside if each.recompute)
        return sum(layer.statistics_bytes for layer in own) + sum(inside)

    def _row(self, at: int, saved_bytes: int, running_bytes: int, **changes: Any) -> LayerProfile:
        layer, held = self.chain[at], self.tensors.held_output_bytes(at)
        if layer.output_gradient_bytes is not None and at < len(self.chain) - 1:
            changes["output_gradient_bytes"] = layer.output_gradient_bytes - self.tensors.callers_gradient_bytes(at)
        return replace(
            layer,
            saved_bytes=saved_bytes,
            forward_transient_bytes=running_bytes - saved_bytes,
            held_output_bytes=None if held == layer.output_bytes else held,
            pending_output_bytes=self.tensors.pending_output_bytes(at),
            **changes,
        )


def _bounds(layers: Sequence[LayerProfile], peak: int) -> GradientPeaks:
    """Bounds for a segment that runs again, whose backward is in the row of its last layer."""
    keeping = peak + sum(layer.gradient_bytes for layer in layers)
    return GradientPeaks(peak, peak, keeping, keeping)


def _on_device(rows: list[LayerProfile], stage: _Stage) -> list[LayerProfile]:
    """The rows if saved tensors move to the host: the device holds the stage's output and the layer that runs.

    A backward fetches a tensor when an operator asks for it, so the device holds at most what the segment had saved.
    """
    left, tensors = [], stage.tensors
    for at, row in enumerate(rows):
        stays = tensors.held_output_bytes(at) if at == len(rows) - 1 else 0
        gone = row.saved_bytes - stays
        split = row.split
        fetched = gone + tensors.counted_before_bytes(stage.start_of(at), at)
        left.append(
            replace(
                row.with_backward(row.backward_transient_bytes + fetched),
                saved_bytes=stays,
                forward_transient_bytes=row.forward_transient_bytes + gone + tensors.counted_before_bytes(at, at),
                split=None if split is None else replace(split.with_more(fetched), chained_transient_bytes=None),
            )
        )
    return left
