"""Sends to all ranks of a pipeline, once per window, sizes (from rank to rank) and the loss (from the last stage)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.measure.timeline import Timeline
from runner.engine.rank_view import RankView
from runner.engine.transport.base import Channel, Handle, Transport
from runner.engine.window import StepBatch, Window
from runner.errors import RunFailedError
from runner.model.boundary import flatten, num_samples
from runner.model.seeds import OWN_GENERATOR

__all__ = ["Headers"]


class Headers:
    """Sends the header from the first stage through all ranks, and the totals from the last stage.

    Totals are sent directly to each rank when the last micro-batch's loss is known, and wait there until STEP. So a
    rank that ends its window early need not wait for the others.

    Args:
        view: the place of this rank.
        placement: for each pipeline, the position of each stage.
        transport: sends and receives messages.
    """

    def __init__(self, view: RankView, placement: Sequence[Sequence[int]], transport: Transport) -> None:
        self._view = view
        self._transport = transport
        self._signatures: dict[tuple[object, ...], int] = {}
        self._passing: dict[tuple[Channel, int], tuple[Handle, Tensor]] = {}
        self._down = _chain(placement[0][0], len(view.pipeline))
        self._lasts = tuple(dict.fromkeys(row[-1] for row in placement))
        self._last = self._lasts[0]

    def header(
        self, batch: StepBatch, *, step: int, training: bool, asks: int, timeline: Timeline
    ) -> tuple[int, int, int]:
        """Receive the header and pass it on; return samples, the input's signature, what ranks ask for."""
        previous, following = self._neighbours()
        header = torch.zeros(6, dtype=torch.int64, device=self._transport.device)
        if previous is None:
            samples = batch.samples if batch.samples is not None else num_samples(batch.inputs)
            checksum = -1 if batch.checksum is None else batch.checksum
            values = [samples, self._signature(batch), int(training), step, 0, checksum]
            header = torch.tensor(values, device=header.device)
        else:
            start = timeline.moment()
            self._transport.receive(header, previous, Channel.HEADER).wait()
            timeline.add("waiting", start)
        header[4] += asks
        values = [int(value) for value in header.tolist()]
        if values[2:4] != [int(training), step]:
            raise RunFailedError(
                f"rank {self._transport.rank} is at step {step + 1} (training: {training}) where the rank before it "
                f"is at step {values[3] + 1} (training: {bool(values[2])}): the ranks' loops differ"
            )
        if batch.checksum is not None and batch.checksum != values[5]:
            raise RunFailedError(
                f"step {step + 1}: rank {self._transport.rank} loaded other samples than rank "
                f"{self._view.pipeline[self._down[0]]}, so that inputs would meet other samples' targets: all ranks of "
                f"a pipeline must get the same from the data function, the dataset and data.collate; {OWN_GENERATOR}"
            )
        if following is not None:
            self._pass_on(header, following, Channel.HEADER)
        elif training and self._view.position != self._last:
            self._pass_on(header[4:5].clone(), self._view.pipeline[self._last], Channel.ASKS)
        return values[0], values[1], values[4]

    def _signature(self, batch: StepBatch) -> int:
        tensors, structure = flatten(batch.inputs)
        shapes = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)
        return self._signatures.setdefault((str(structure), *shapes), len(self._signatures))

    def _neighbours(self) -> tuple[int | None, int | None]:
        """The global ranks before and after this one in the order in which the header passes."""
        at = self._down.index(self._view.position)
        before = self._view.pipeline[self._down[at - 1]] if at else None
        after = self._view.pipeline[self._down[at + 1]] if at + 1 < len(self._down) else None
        return before, after

    def send_totals(self, window: Window) -> None:
        """Send the window's totals to every other rank of the pipeline; the last stage's rank calls it per window.

        If several ranks have a last stage, each sends its own part of the sums, and the first of them sends the asks.
        """
        if self._view.position != self._last:
            window.asks = 0
        elif window.training and self._down[-1] != self._last:
            asked = torch.zeros(1, dtype=torch.int64, device=self._transport.device)
            self._transport.receive(asked, self._view.pipeline[self._down[-1]], Channel.ASKS).wait()
            window.asks = int(asked)
        message = window.totals().to(self._transport.device)
        for position, rank in enumerate(self._view.pipeline):
            if position != self._view.position:
                self._pass_on(message, rank, Channel.TOTALS)

    def totals(self, window: Window) -> Tensor:
        """Wait for the window's totals over the pipeline (:meth:`Window.totals`); the same result on every rank."""
        parts = []
        for last in self._lasts:
            if last == self._view.position:
                parts.append(window.totals())
                continue
            received = torch.empty_like(window.totals(), device=self._transport.device)
            self._transport.receive(received, self._view.pipeline[last], Channel.TOTALS).wait()
            parts.append(received.cpu())
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def _pass_on(self, message: Tensor, peer: int, channel: Channel) -> None:
        """Send without waiting for the peer, which may be a step behind; the previous message has arrived by now."""
        before = self._passing.pop((channel, peer), None)
        if before is not None:
            before[0].wait()
        self._passing[channel, peer] = self._transport.send(message, peer, channel), message

    def drain(self) -> None:
        """Wait for messages that are on their way."""
        for handle, _ in self._passing.values():
            handle.wait()
        self._passing.clear()


def _chain(start: int, length: int) -> list[int]:
    """The positions from ``start`` around the pipeline, in the order in which headers pass."""
    return [(start + offset) % length for offset in range(length)]
