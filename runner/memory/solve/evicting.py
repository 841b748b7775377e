"""Programs that leave it to the run what is dropped: what autograd saves lies in a pool, until that is full.

Which tensors are dropped is decided in the run. The rows say that each layer keeps an equal share of what it saves, so
that all together are the pool. The stage's output is not in it, because its caller holds it until the backward is over.
While a layer runs forward, what it needs and makes may be in the pool or not, and both are counted; while it runs
backward, the pool may be full, as others come back into what it frees. So the peak is a bound.

Where one micro-batch at a time is in the pool, a rehearsal tells the peak exactly: see
:class:`runner.profile.Rehearsal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, NamedTuple

from runner.memory.solve.undivided import undivided_peaks, with_undivided
from runner.memory.solve.values import PlainStage, StageProgram
from runner.profile import GradientPeaks, LayerProfile, Rehearsal

__all__ = ["EvictingProgram"]


@dataclass(frozen=True, slots=True)
class EvictingProgram(StageProgram):
    """Leaves it to the run what is kept: what autograd saves lies in a pool, and is dropped when that is full.

    Args:
        first, last: the stage's layers, indices in the whole model, inclusive.
        score: what is dropped first, a key of :data:`runner.memory.solve.graph.evicting.SCORES`.
        pool_bytes: bytes of the pool, for all micro-batches in flight together.
        in_flight: the largest number of these.
        again: for each layer an estimate of how often it will run again.
    """

    first: int
    last: int
    score: str
    pool_bytes: int
    in_flight: int
    again: tuple[int, ...]

    installer: ClassVar[str] = "runner.memory.apply.evicting:install_evicting"

    @property
    def forwards(self) -> int:
        """See :class:`runner.memory.solve.values.StageProgram`."""
        return len(self.again) + sum(self.again)

    @property
    def wants_rehearsal(self) -> bool:
        """See :class:`runner.memory.solve.values.StageProgram`."""
        return self.in_flight == 1

    def rows(self, stage: PlainStage) -> list[LayerProfile]:
        """See :class:`runner.memory.solve.values.StageProgram`."""
        own = repr(self) if stage.rehearsals else ""
        for each in stage.rehearsals:
            if each.program == own:
                plain = stage.adjusted()
                if not each.runs:
                    return _rows_of_no_use(plain)
                return _rehearsed_rows(plain, len(self.again), each, shares=stage.shared.any)
        return _evicting_rows(stage.adjusted(), self)


def _rows_of_no_use(plain: Sequence[LayerProfile]) -> list[LayerProfile]:
    """The rows of a program that cannot run: more memory and time than if everything is kept, so that it is not chosen.

    Args:
        plain: the rows if everything is kept.
    """
    first = replace(plain[0], saved_bytes=plain[0].saved_bytes + 1)
    return [replace(row, backward_seconds=2 * row.backward_seconds) for row in (first, *plain[1:])]


def _rehearsed_rows(plain: Sequence[LayerProfile], count: int, known: Rehearsal, *, shares: bool) -> list[LayerProfile]:
    """The rows of a stage that was rehearsed as a whole: all that is saved is in the first one, as if it came first.

    Any layer may be the one at the peak. In the rows from the last trained layer on, which makes the first gradients of
    weights, there is the peak of the whole stage; those before have none.

    Args:
        plain: the rows if everything is kept, with that of the loss if there is one.
        count: the number of layers.
        known: what was found out.
        shares: whether other layers of the model use weights of the stage.
    """
    output = _held_output(plain[-1]) if len(plain) == count else 0
    peak, gradients = known.backward_peak_bytes, sum(row.gradient_bytes for row in plain)
    later, growing = known.later_backward_peak_bytes, known.growing_backward_peak_bytes
    if shares:  # gradients of other stages may be there, or come first
        later, growing = peak, peak + gradients
    first_in_backward = max((at for at, row in enumerate(plain) if row.gradient_bytes), default=0)
    flops = sum(row.forward_flops for row in plain)
    again = (known.backward_flops - sum(row.backward_flops for row in plain)) / flops if flops else 0.0
    rows = []
    for at, row in enumerate(plain):
        inner, peaks = -known.saved_bytes, None
        if at >= first_in_backward:
            inner, peaks = peak - output, GradientPeaks(later, later - output, growing, growing - output)
        of_weights, waiting = row.split_seconds[1], undivided_peaks(row).waiting
        made = replace(
            row,
            saved_bytes=0 if at else known.saved_bytes,
            forward_transient_bytes=known.forward_peak_bytes - known.saved_bytes,
            backward_transient_bytes=peak,
            chained_backward_bytes=inner,
            gradient_peaks=peaks,
            output_gradient_bytes=0 if at < len(plain) - 1 else row.output_gradient_bytes,
            held_output_bytes=output if at == count - 1 else 0,
            pending_output_bytes=0,
            backward_flops=row.backward_flops + again * row.forward_flops,
            backward_seconds=row.backward_seconds + again * row.forward_seconds,
            weight_gradient_seconds=of_weights,
        )
        rows.append(with_undivided(made, waiting, peak + gradients, inner + gradients))
    return rows


def _evicting_rows(plain: Sequence[LayerProfile], program: EvictingProgram) -> list[LayerProfile]:
    """The rows of a stage's layers, and that of the loss if there is one.

    Args:
        plain: the rows if everything is kept.
        program: the stage's program.
    """
    count, own = len(program.again), program.pool_bytes // program.in_flight
    output = _held_output(plain[count - 1])
    ends = list(accumulate((row.saved_bytes for row in plain[: count - 1]), initial=0))
    ends.append(ends[-1] + plain[count - 1].saved_bytes - output)
    if (total := ends[-1]) <= own:
        return list(plain)
    others = (program.in_flight - 1) * (total - own)  # what other micro-batches may have beyond their shares
    kept = [own * end // total for end in ends]
    rows = []
    for at, row in enumerate(plain[:count]):
        given = plain[at - 1].output_bytes if at else 0
        running = row.saved_bytes + row.forward_transient_bytes
        alone = running if row.unsaved_forward_bytes is None else row.unsaved_forward_bytes
        room = _Room(kept[at], kept[at + 1], own, output if at == count - 1 else 0, others + ends[at + 1] - own)
        rows.append(_row(row, room, min(own + alone + given, others + ends[at] + running), program.again[at]))
    return [*rows, *plain[count:]]


def _held_output(last: LayerProfile) -> int:
    """The part of the stage's output that its last row counts; it is there without the pool."""
    return last.output_bytes if last.held_output_bytes is None else last.held_output_bytes


class _Room(NamedTuple):
    """The part of the pool in which a layer runs.

    Args:
        before, until, whole: bytes that are kept of the layers before it, of these and itself, and of all layers.
        output: its output, if that is the stage's.
        beyond: what all micro-batches have saved when its backward begins, less the pool; may be negative.
    """

    before: int
    until: int
    whole: int
    output: int
    beyond: int

    def backward(self, transient: int, made: int) -> int:
        """The peak of its backward above what is kept up to it.

        Either the pool is full, whatever the backward frees, or all that was saved is there.

        Args:
            transient: the same above what it saves, if everything is kept; what it frees is subtracted.
            made: the most that it makes at once.
        """
        return min(self.beyond + transient, made) + self.whole - self.until


def _row(plain: LayerProfile, room: _Room, forward_peak: int, again: int) -> LayerProfile:
    """The row of a layer.

    Args:
        plain: its row if everything is kept.
        room: the pool.
        forward_peak: the most that is alive in its forward.
        again: how often it runs again.
    """
    of_weights, of_i = plain.split_seconds[1], undivided_peaks(plain)
    made = plain.backward_transient_bytes + plain.saved_bytes  # at most all that it saves is freed before the peak
    of_all = made + plain.gradient_bytes  # I makes the gradients of all weights
    more, held, saved = again * plain.forward_seconds, plain.held_output_bytes, room.until - room.before
    peaks = (room.backward(own, made) for own in (plain.backward_transient_bytes, plain.inner_backward_bytes))
    row = replace(
        plain.with_backward(*peaks),
        saved_bytes=saved + room.output,
        forward_transient_bytes=forward_peak - room.until - room.output,
        held_output_bytes=room.output or min(saved, plain.output_bytes if held is None else held),
        backward_flops=plain.backward_flops + again * plain.forward_flops,
        backward_seconds=plain.backward_seconds + more,
        weight_gradient_seconds=of_weights,
    )
    return with_undivided(row, of_i.waiting, room.backward(of_i.alone, of_all), room.backward(of_i.inner, of_all))
