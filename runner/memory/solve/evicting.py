"""Programs that leave it to the run what is dropped: what autograd saves lies in a pool, until that is full.

Which tensors are dropped is decided in the run. The rows say that each layer keeps an equal share of what it saves, so
that all together are the pool. The stage's output is not in it, because its caller holds it until the backward is over.
While a layer runs forward, what it needs and makes may be in the pool or not, and both are counted; while it runs
backward, the pool may be full, as others come back into what it frees. So the peak is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, NamedTuple

from runner.memory.solve.undivided import undivided_peaks, with_undivided
from runner.memory.solve.values import PlainStage, StageProgram
from runner.profile import LayerProfile

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

    def rows(self, stage: PlainStage) -> list[LayerProfile]:
        """See :class:`runner.memory.solve.values.StageProgram`."""
        return _evicting_rows(stage.adjusted(), self)


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
    of_weights, of_i, made = plain.split_seconds[1], undivided_peaks(plain), plain.backward_made_bytes
    if made is None:
        made = plain.backward_transient_bytes + plain.saved_bytes  # at most all that it saves is freed before the peak
    of_all = made + plain.gradient_bytes  # I makes the gradients of all weights
    more, held, saved = again * plain.forward_seconds, plain.held_output_bytes, room.until - room.before
    row = replace(
        plain,
        saved_bytes=saved + room.output,
        forward_transient_bytes=forward_peak - room.until - room.output,
        backward_transient_bytes=room.backward(plain.backward_transient_bytes, made),
        chained_backward_bytes=room.backward(plain.inner_backward_bytes, made),
        gradient_peaks=None,
        held_output_bytes=room.output or min(saved, plain.output_bytes if held is None else held),
        backward_flops=plain.backward_flops + again * plain.forward_flops,
        backward_seconds=plain.backward_seconds + more,
        weight_gradient_seconds=of_weights,
    )
    return with_undivided(row, of_i.waiting, room.backward(of_i.alone, of_all), room.backward(of_i.inner, of_all))
