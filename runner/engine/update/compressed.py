"""Sums one stage's gradients by a compressor: residuals, plain steps at the beginning, steps that are not applied.

What is compressed is the sum over a replica's micro-batches. Where the residual is fed back, it is added before, and
what is left over is the next residual. Residuals are kept without the loss scale, which may change between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.engine.transport.base import Handle, Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import ReducerState
from runner.model.seeds import mix_seed
from runner.optim.compression.rounds import Compress, Exchanged, Kept, Parts, Rounds, Total, Turn
from runner.optim.states.whole_norms import part_of

__all__ = ["CompressedSum"]

_RESIDUAL = "residual"


class CompressedSum:
    """A :class:`runner.engine.update.reducer.Reducer` around a compressor.

    Args:
        gradients: the stage's gradients.
        compress: starts the exchange of one step.
        feedback: whether residuals are kept and added to the next gradients.
        start_step: steps before this one are summed without compression.
    """

    def __init__(self, gradients: StageGradients, compress: Compress, *, feedback: bool, start_step: int = 0) -> None:
        self._names = gradients.names
        self._device = gradients.parameters[0].device if gradients.parameters else torch.device("cpu")
        self._compress = compress
        self._start_step = start_step
        self._residuals: list[Tensor] | None = None
        if feedback:
            self._residuals = [torch.zeros_like(each, dtype=torch.float32) for each in gradients.parameters]
        self._kept: list[Kept] = [{} for _ in self._names]
        self._coming: tuple[list[Tensor] | None, list[Kept]] | None = None

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        if gradients.of_step.index < self._start_step:
            return gradients.start_sum(transport, group)
        if not self._names:
            return []
        rounds = self._compress(self._values(gradients), self._kept, self._turn(gradients, transport.rank, group))
        return [_Exchange(self, gradients, rounds, transport, group)]

    def settle(self, applied: bool) -> None:
        if applied and self._coming is not None:
            self._residuals, self._kept = self._coming
        self._coming = None

    def state_dict(self) -> ReducerState:
        found = {name: dict(kept) for name, kept in zip(self._names, self._kept, strict=True)}
        for name, residual in zip(self._names, self._residuals or (), strict=False):
            found[name][_RESIDUAL] = residual
        return {name: entries for name, entries in found.items() if entries}

    def load_state_dict(self, state: ReducerState) -> None:
        for at, name in enumerate(self._names):
            self._load(at, state.get(name, {}))

    def _load(self, at: int, entries: Mapping[str, Tensor]) -> None:
        if self._residuals is not None:
            residual = self._residuals[at]
            self._residuals[at] = (
                entries[_RESIDUAL].to(residual, copy=True) if _RESIDUAL in entries else residual.zero_()
            )
        self._kept[at] = {key: each.to(self._device, copy=True) for key, each in entries.items() if key != _RESIDUAL}

    def finish(self, gradients: StageGradients, found: Exchanged) -> None:
        """Write the sums into the gradients; what goes to the next step waits for :meth:`settle`."""
        scale = gradients.of_step.loss_scale
        for parameter, total in zip(gradients.parameters, found.sums, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(total)
        for parameter, left in zip(gradients.parameters, found.left or (), strict=False):
            part = part_of(parameter)
            if part is not None and parameter.grad is not None:  # some send a sign of zeros, too
                part.clear_padding(parameter.grad)
                part.clear_padding(left)
        residuals = [left / scale for left in found.left] if self._residuals is not None else None
        self._coming = residuals, [*found.kept]

    def _values(self, gradients: StageGradients) -> list[Tensor]:
        """The gradients in fp32 with the residuals, as copies."""
        values = []
        for at, parameter in enumerate(gradients.parameters):
            assert parameter.grad is not None
            value = parameter.grad.detach().to(torch.float32, copy=True)
            if self._residuals is not None:
                value.add_(self._residuals[at], alpha=gradients.of_step.loss_scale)
            values.append(value)
        return values

    def _turn(self, gradients: StageGradients, rank: int, group: Sequence[int]) -> Turn:
        of = gradients.of_step
        shared = mix_seed(of.seed, of.index, "compression", self._names[0])
        return Turn(of.index - self._start_step, len(group), shared, mix_seed(shared, group.index(rank)))


class _Exchange:
    """A :class:`Handle`: the rounds of one exchange. The first message leaves at once, others during ``wait``."""

    def __init__(
        self,
        owner: CompressedSum,
        gradients: StageGradients,
        rounds: Rounds,
        transport: Transport,
        group: Sequence[int],
    ) -> None:
        self._owner, self._gradients, self._rounds = owner, gradients, rounds
        self._transport, self._group = transport, group
        self._request: Total | Parts | None = next(rounds)
        self._pending = self._begin()

    def wait(self) -> None:
        while self._request is not None:
            try:
                self._request = self._rounds.send(self._pending())
            except StopIteration as stop:
                self._request = None
                self._owner.finish(self._gradients, stop.value)
            else:
                self._pending = self._begin()

    def is_completed(self) -> bool:
        return self._request is None

    def _begin(self) -> Callable[[], Any]:
        """Send the message; return what waits for the answer to it and returns the answer."""
        request = self._request
        assert request is not None
        if isinstance(request, Parts):
            return self._transport.start_all_gather(request.tensor, self._group).wait
        handle, tensor = self._transport.all_reduce(request.tensor, self._group), request.tensor

        def wait() -> Tensor:
            handle.wait()
            return tensor

        return wait
