"""Begins a window: gets the step's sizes from the batch or the rank before, and cuts micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from runner.engine.headers import Headers
from runner.engine.measure.timeline import Timeline
from runner.engine.rank_view import RankView
from runner.engine.stream import RankStream
from runner.engine.window import StepBatch, Window, split_microbatches, with_stand_ins
from runner.errors import RunFailedError
from runner.plan.layout.batches import split_sizes

__all__ = ["WindowOpener"]


class WindowOpener:
    """Makes windows from batches, on one rank.

    Args:
        view: the place of the rank.
        stream: tells which losses this rank computes.
        headers: passes sizes on.
        microbatches: number of micro-batches of a step.
        shares: the share of each in the samples; empty: all are alike.
        all_take_part: whether micro-batches without samples are computed on a stand-in.
        num_metrics: how many sums of metrics there are in windows that are not of training.
        num_figures: how many sums of figures there are beside the loss in windows of training.
    """

    def __init__(
        self,
        view: RankView,
        stream: RankStream,
        headers: Headers,
        *,
        microbatches: int,
        shares: Sequence[float] = (),
        all_take_part: bool,
        num_metrics: int = 0,
        num_figures: int = 0,
    ) -> None:
        self._view, self._stream, self._headers = view, stream, headers
        self._microbatches, self._all_take_part = microbatches, all_take_part
        self._num_rows = {True: num_figures, False: num_metrics}
        self._parts = shares or microbatches

    def open(
        self, batch: StepBatch, *, step: int, training: bool, asks: int, loss_scale: float, timeline: Timeline
    ) -> Window:
        """Make the window of a batch, and send its sizes to the next rank.

        Args:
            asks: what this rank asks of all.
            timeline: the time of waiting for the rank before is added to it.

        Raises:
            RunFailedError: ranks loaded different samples, or are at different steps.
        """
        samples, signature, asked = self._headers.header(
            batch, step=step, training=training, asks=asks, timeline=timeline
        )
        if batch.samples is not None and batch.samples != samples:
            raise RunFailedError(
                f"step {step + 1}: this rank loaded {batch.samples} samples where the first stage loaded {samples}; "
                "the dataset must give the same samples on every rank"
            )
        sizes = split_sizes(samples, self._parts)
        empty = frozenset(number for number, size in enumerate(sizes) if not size)
        stand_ins = empty if self._all_take_part else frozenset()

        def parts(value: Any) -> list[Any]:
            return with_stand_ins(value, split_microbatches(value, sizes), stand_ins)

        has_inputs, is_last = 0 in self._view.holders, self._view.num_stages - 1 in self._view.holders
        has_targets = is_last and batch.targets is not None
        return Window(
            step=step,
            training=training,
            sizes=tuple(max(size, int(number in stand_ins)) for number, size in enumerate(sizes)),
            signature=signature,
            inputs=parts(batch.inputs) if has_inputs else None,
            targets=parts(batch.targets) if has_targets else None,
            asks=asked,
            loss_scale=loss_scale,
            own_losses=self._stream.own_losses(training) if has_targets else (),
            stand_ins=stand_ins,
            first=self._stream.place(step) * self._microbatches if training else 0,
            waits_for_step=set(self._view.holders),
            metrics=torch.zeros(self._num_rows[training], 2, dtype=torch.float64),
        )
