"""Replicas that exchange the changes of several optimizer steps, instead of the gradients of each step.

A wave is a number of steps. When a stage has ended its last step of a wave, it starts to sum, over its replicas, what
the wave has changed in the weights of each. ``distance`` waves later it takes the sum in. Every replica keeps the
server's copy of the weights: the first weights and all sums that were taken in, which are the same bits everywhere. The
weights of a replica are this copy and its own changes of waves whose sums it has not taken in.

Source: Park et al., HetPipe, 2020, wave synchronous parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.transport.base import Handle, Transport
from runner.engine.transport.counting import CountingTransport, SentBytes
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import PlainSum
from runner.model.layers import StageModule
from runner.schedule.values import Schedule

__all__ = ["OwnGradients", "WaveExchange", "make_waves"]


class OwnGradients(PlainSum):
    """Leaves gradients as they are: replicas exchange changes of weights instead."""

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        return []


class _Wave(NamedTuple):
    """A wave whose sum has not been taken in.

    Args:
        own: [elements], what it has changed in this replica's weights.
        total: [elements], the sum over all replicas when ``handle`` has been waited for.
    """

    own: Tensor
    total: Tensor
    handle: Handle


class WaveExchange:
    """Exchanges the changes of one stage's weights with its replicas.

    Args:
        parameters: the trained weights of the stage, all of one dtype.
        transport: this rank's transport.
        group: the global ranks of the stage's replicas.
        wave: number of optimizer steps from one exchange to the next.
        distance: number of waves by which changes are taken in late.
    """

    def __init__(
        self, parameters: Sequence[Parameter], transport: Transport, group: Sequence[int], *, wave: int, distance: int
    ) -> None:
        self._parameters = list(parameters)
        self._sent = SentBytes()
        self._transport, self._group = CountingTransport(transport, self._sent), tuple(group)
        self._wave, self._distance = wave, distance
        self._steps = 0  # since the last wave ended
        self._server: Tensor | None = None
        self._start: Tensor | None = None  # this replica's weights at the beginning of the wave
        self._waves: deque[_Wave] = deque()

    @property
    def bytes_sent(self) -> float:
        """The number of bytes that this rank has sent so far."""
        return self._sent.num_bytes

    @property
    def held(self) -> Sequence[Tensor]:
        """All copies of weights and of changes."""
        copies = [each for each in (self._server, self._start) if each is not None]
        return [*copies, *(tensor for wave in self._waves for tensor in (wave.own, wave.total))]

    def before_step(self, window: int) -> None:
        """Keep the weights from which changes are counted."""
        if self._server is None and self._parameters:
            self._server = self._flat()
            self._start = self._server.clone()

    def after_step(self) -> None:
        """Count a step; at the end of a wave start its sum, and take in the sum that is due."""
        self._steps += 1
        if self._steps == self._wave:
            self._end_wave()
            if len(self._waves) > self._distance:
                self._take_in(1)

    def close(self) -> None:
        """End the wave early, and take in all sums: all replicas then have the same weights, and nothing is kept.

        All replicas must call it after the same step.
        """
        if self._steps:
            self._end_wave()
        if self._waves:
            self._take_in(len(self._waves))
        self._server = self._start = None

    @torch.no_grad()
    def _end_wave(self) -> None:
        self._steps = 0
        if self._start is None:
            return
        own = self._flat() - self._start
        total = own.clone()
        self._waves.append(_Wave(own, total, self._transport.all_reduce(total, self._group)))
        self._start = self._flat()

    @torch.no_grad()
    def _take_in(self, count: int) -> None:
        """Add the sums of the oldest waves to the server's copy, and set the weights anew."""
        if self._server is None:
            return
        for _ in range(count):
            wave = self._waves.popleft()
            wave.handle.wait()
            self._server += wave.total
        self._start = self._server.clone()
        for wave in self._waves:
            self._start += wave.own
        at = 0
        for parameter in self._parameters:
            parameter.copy_(self._start[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()

    def _flat(self) -> Tensor:
        """A copy of the weights: [elements]."""
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters])


def make_waves(
    stages: Mapping[int, StageModule], schedule: Schedule, transport: Transport, replicas: Sequence[int]
) -> dict[int, WaveExchange]:
    """Make the exchange of each stage, if replicas exchange changes of weights."""
    if not schedule.wave or len(replicas) == 1:
        return {}
    trained = {stage: [each for each in module.parameters() if each.requires_grad] for stage, module in stages.items()}
    return {
        stage: WaveExchange(parameters, transport, replicas, wave=schedule.wave, distance=schedule.distance)
        for stage, parameters in trained.items()
    }
