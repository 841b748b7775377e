"""Programs that leave it to the run what is dropped: what autograd saves lies in a pool, until that is full.

Which tensors are dropped is decided in the run. The rows say that each layer keeps an equal share of what it saves, so
that all together are the pool. While a layer runs forward, what it needs and makes may be in the pool or not, and both
are counted; while it runs backward, the pool may be full. So the peak is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

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
    total = sum(row.saved_bytes for row in plain[:count])
    if total <= own:
        return list(plain)
    ends = list(accumulate((row.saved_bytes for row in plain[:count]), initial=0))
    kept = [own * end // total for end in ends]
    rows = []
    for at, row in enumerate(plain[:count]):
        given = plain[at - 1].output_bytes if at else 0
        running = row.saved_bytes + row.forward_transient_bytes
        alone = running if row.unsaved_forward_bytes is None else row.unsaved_forward_bytes
        peak = own + alone + given
        if program.in_flight == 1:  # others might hold more than their share of the pool
            peak = min(peak, ends[at] + running)
        rows.append(_row(row, (kept[at], kept[at + 1], own), peak, program.again[at]))
    return [*rows, *plain[count:]]


def _row(plain: LayerProfile, kept: tuple[int, int, int], forward_peak: int, again: int) -> LayerProfile:
    """The row of a layer.

    Args:
        plain: its row if everything is kept.
        kept: bytes that are kept up to the layer before it, up to it, and of all layers.
        forward_peak: the most that is alive in its forward.
        again: how often it runs again.
    """
    before, until, whole = kept
    of_weights, of_i = plain.split_seconds[1], undivided_peaks(plain)
    more, held = again * plain.forward_seconds, plain.held_output_bytes
    row = replace(
        plain,
        saved_bytes=until - before,
        forward_transient_bytes=forward_peak - until,
        backward_transient_bytes=plain.backward_transient_bytes + whole - until,
        chained_backward_bytes=plain.inner_backward_bytes + whole - until,
        held_output_bytes=min(until - before, plain.output_bytes if held is None else held),
        backward_flops=plain.backward_flops + again * plain.forward_flops,
        backward_seconds=plain.backward_seconds + more,
        weight_gradient_seconds=of_weights,
    )
    return with_undivided(row, of_i.waiting, of_i.alone + whole - until, of_i.inner + whole - until)
