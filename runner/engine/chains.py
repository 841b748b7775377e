"""What passes once per window through all ranks of a pipeline: sizes downstream, the loss upstream."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.context import RankView
from runner.engine.timeline import Timeline
from runner.engine.transport import Channel, Handle, Transport
from runner.engine.window import StepBatch
from runner.errors import RunFailedError
from runner.model.boundary import flatten, num_samples

__all__ = ["Chains"]


class Chains:
    """The header's way from the first stage, and the totals' from the last.

    Args:
        view: where this rank stands.
        placement: position of each stage.
        transport: how messages travel.
    """

    def __init__(self, view: RankView, placement: Sequence[int], transport: Transport) -> None:
        self._view = view
        self._transport = transport
        self._signatures: dict[tuple[object, ...], int] = {}
        self._passing: dict[Channel, tuple[Handle, Tensor]] = {}
        self._down = _chain(placement[0], len(view.pipeline), +1)
        self._up = _chain(placement[-1], len(view.pipeline), -1)

    def header(
        self, batch: StepBatch, *, step: int, training: bool, stop: bool, timeline: Timeline
    ) -> tuple[int, int, int]:
        """Samples of the window, the signature of its input, and how many ranks want to stop: down the pipeline."""
        previous, following = self._neighbours(self._down)
        header = torch.zeros(6, dtype=torch.int64, device=self._transport.device)
        if previous is None:
            samples = batch.samples if batch.samples is not None else num_samples(batch.inputs)
            checksum = -1 if batch.checksum is None else batch.checksum
            values = [samples, self._signature(batch), int(training), step, 0, checksum]
            header = torch.tensor(values, device=header.device)
        else:
            start = time.perf_counter()
            self._transport.receive(header, previous, Channel.HEADER).wait()
            timeline.current.waiting += time.perf_counter() - start
        header[4] += int(stop)
        values = [int(value) for value in header.tolist()]
        if values[2:4] != [int(training), step]:
            raise RunFailedError(
                f"rank {self._transport.rank} is at step {step} (training: {training}) where the rank before it "
                f"is at step {values[3]} (training: {bool(values[2])}): the ranks' loops differ"
            )
        if batch.checksum is not None and batch.checksum != values[5]:
            raise RunFailedError(
                f"step {step}: rank {self._transport.rank} loaded other samples than the first stage: all ranks "
                "of a pipeline must go through the data in one order"
            )
        if following is not None:
            self._pass_on(header, following, Channel.HEADER)
        return values[0], values[1], values[4]

    def _signature(self, batch: StepBatch) -> int:
        tensors, structure = flatten(batch.inputs)
        shapes = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)
        return self._signatures.setdefault((str(structure), *shapes), len(self._signatures))

    def _neighbours(self, chain: Sequence[int]) -> tuple[int | None, int | None]:
        """Global ranks before and after this one in a chain of positions."""
        at = chain.index(self._view.position)
        before = self._view.pipeline[chain[at - 1]] if at else None
        after = self._view.pipeline[chain[at + 1]] if at + 1 < len(chain) else None
        return before, after

    def totals(self, totals: Tensor) -> None:
        """Fill in ``[sum, weight, stop]``, known on the last stage, on every rank of the pipeline."""
        previous, following = self._neighbours(self._up)
        if previous is not None:
            received = torch.empty_like(totals, device=self._transport.device)
            self._transport.receive(received, previous, Channel.TOTALS).wait()
            totals.copy_(received)
        if following is not None:
            self._pass_on(totals.to(self._transport.device), following, Channel.TOTALS)

    def _pass_on(self, message: Tensor, peer: int, channel: Channel) -> None:
        """Send without waiting for the peer, which may be a step behind; the message before has arrived by now."""
        before = self._passing.pop(channel, None)
        if before is not None:
            before[0].wait()
        self._passing[channel] = self._transport.send(message, peer, channel), message

    def drain(self) -> None:
        """Wait for what is under way."""
        for handle, _ in self._passing.values():
            handle.wait()
        self._passing.clear()


def _chain(start: int, length: int, direction: int) -> list[int]:
    """Positions from ``start`` around the pipeline: the way of headers and totals."""
    return [(start + direction * offset) % length for offset in range(length)]
