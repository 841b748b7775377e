"""Keeps the gradients of one stage in persistent flat buffers, which are zeroed, reduced and scaled as a whole.

Every ``parameter.grad`` is a view of a buffer, so that an all-reduce need not copy anything. Gradients are scaled in
one place only: at STEP, by the step's weight. A parameter that no backward of a step has reached has no gradient, as in
a plain loop: optimizers neither decay it nor change its states.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from runner.engine.transport.base import Handle, Transport
from runner.engine.transport.counting import CountingTransport, SentBytes
from runner.engine.update.reducer import PlainSum, Reducer
from runner.memory.apply.weight_swap import is_at_home
from runner.model.tags import ParameterTag
from runner.optim.compression.rounds import GradientStep

__all__ = ["StageGradients"]

logger = logging.getLogger(__name__)


class StageGradients:
    """The gradients of trained parameters that are reduced together: those of one stage, or of tied weights.

    ``reducer`` sums the gradients over the ranks that hold the parameters. It is a plain sum until another one is set.

    Args:
        parameters: ``(global name, parameter)`` pairs; all parameters are trained.
        tag: the tag of one of the parameters. All of them have the same holders. None: no other rank holds them.

    Attributes:
        counted: names of the parameters that count in the gradient norm on this rank; of the others, another rank
            counts its copies.
        of_step: the step whose gradients these are.
        sent: counts the bytes that this rank has sent to sum them.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], tag: ParameterTag | None = None) -> None:
        trained = list(parameters)
        self.tag = tag
        self.reducer: Reducer = PlainSum()
        self.of_step = GradientStep()
        self.sent = SentBytes()
        self.names = [name for name, _ in trained]
        self.counted = frozenset(self.names if tag is None or tag.is_first_copy else ())
        self.parameters = [parameter for _, parameter in trained]
        by_kind: dict[tuple[torch.dtype, torch.device, bool], list[Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_kind[parameter.dtype, parameter.device, is_at_home(parameter)].append(parameter)
        self.flats: list[Tensor] = []
        self.num_bytes_at_home = 0  # of the buffers, in the host's memory because their weights are at home there
        view_of: dict[Parameter, Tensor] = {}
        self._reached: Tensor | None = None  # by parameter, on how many holders a backward has reached it
        self._counts: list[int] | None = None  # the same once it is known
        self._has_told = False
        self._asks = True  # whether the holders tell each other what was reached
        for members in by_kind.values():
            flat, views = _flat_gradient(members)
            self.flats.append(flat)
            self.num_bytes_at_home += flat.numel() * flat.element_size() if is_at_home(members[0]) else 0
            view_of |= zip(members, views, strict=True)
        self._views = [(parameter, view_of[parameter]) for parameter in self.parameters]
        self._versions = [view._version for _, view in self._views]
        self.claim()

    @property
    def holders(self) -> tuple[int, ...]:
        """The global ranks whose gradients are summed, ascending; empty where no other rank holds the parameters."""
        return self.tag.holders if self.tag is not None else ()

    @property
    def num_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def claim(self) -> None:
        """Make every ``grad`` a view of its buffer again, because other code may have replaced it.

        Lightning, for example, sets it to None before training. A gradient that is there instead is dropped; between
        steps the buffers are zero.
        """
        for parameter, view in self._views:
            if parameter.grad is not view:
                parameter.grad = view

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def close(self, *, applied: bool) -> None:
        """End a step: clear the gradients, and tell the reducer whether the weights were updated with their sums."""
        self._counts = None
        self.reducer.settle(applied)
        self.zero()
        self.claim()
        self._versions = [view._version for _, view in self._views]

    def reach_all(self) -> None:
        """Count every gradient as one that a backward has reached, for an update that is only timed."""
        for _, view in self._views:
            increment_version(view)

    def learn_reached(self) -> None:
        """Read what the holders have told each other of a step, once its sums are there.

        It decides whether they ask in the next one, so that each of them must learn it in every step, also in one that
        is skipped, of which only some may hold what is not finite.
        """
        if self._reached is not None:
            self._counts, self._reached = self._reached.tolist(), None
            self._asks = min(self._counts) < len(self.holders)

    def leave_out_unreached(self, wide: StageGradients) -> None:
        """Give no gradient to the parameters that no backward of the step has reached, on any holder.

        Holders tell each other in their first step, and in all others if there was such a parameter in it. A gradient
        that one of them lacks in later steps only is zero. So are all where a compressor sums them, as what it has left
        over from earlier steps may be among them.

        Args:
            wide: the set that is updated: this one, or that of the master weights.
        """
        counts: Sequence[int]
        if self._counts is not None:
            counts = self._counts
        elif len(self.holders) <= 1:
            counts = self._own_reached()
        elif not isinstance(self.reducer, PlainSum):
            return
        else:
            self._tell_of_unreached()
            return
        for (parameter, _), count in zip(wide._views, counts, strict=True):
            if not count:
                parameter.grad = None

    def _tell_of_unreached(self) -> None:
        """Say once which gradients are zero because no backward of this rank has reached their parameters."""
        if self._has_told or all(reached := self._own_reached()):
            return
        self._has_told = True
        missing = [name for name, is_there in zip(self.names, reached, strict=True) if not is_there]
        logger.info(
            "no sample of this rank's part of a step reached %s, as samples of the first step did: where none of its "
            "other ranks' do either, its gradient counts as zero, and weight decay and momentum go on",
            ", ".join(missing),
        )

    def _own_reached(self) -> list[bool]:
        """By parameter, whether a backward of this rank has added to its gradient, which counts its writers."""
        return [view._version != before for (_, view), before in zip(self._views, self._versions, strict=True)]

    def reduce(self, transport: Transport, of_step: GradientStep | None = None) -> list[Handle]:
        """Start the reducer's sum over the holders; call it when every backward has added its gradients."""
        if len(self.holders) <= 1:
            return []
        self.of_step = of_step or GradientStep()
        told: list[Handle] = []
        if self._asks and self._views and isinstance(self.reducer, PlainSum):
            self._reached = torch.tensor(self._own_reached(), dtype=torch.int32, device=transport.device)
            told.append(transport.all_reduce(self._reached, self.holders))
        return told + self.reducer.start(self, CountingTransport(transport, self.sent), self.holders)

    def start_sum(self, transport: Transport, group: Sequence[int]) -> list[Handle]:
        """Start a plain sum over the ranks of ``group``, in place."""
        return [transport.all_reduce(flat, group) for flat in self.flats]

    def divide(self, weight: float) -> None:
        """Turn sums into means; only here are gradients divided by the step's weight."""
        for flat in self.flats:
            flat.div_(weight)

    def scale(self, factor: float) -> None:
        for flat in self.flats:
            flat.mul_(factor)

    def clamp(self, most: float) -> None:
        """Clip every element to ``[-most, most]``."""
        for flat in self.flats:
            flat.clamp_(-most, most)

    def are_finite(self) -> bool:
        """Whether no gradient is NaN or infinite."""
        return all(_is_finite(flat) for flat in self.flats)

    def widened(self, master_of: Callable[[Tensor], Parameter]) -> StageGradients:
        """Copy the gradients in fp32, as gradients of the master weights; the memory is free when the copy is dropped.

        Args:
            master_of: returns the fp32 weight from which a parameter is rounded.
        """
        masters = [master_of(parameter) for parameter in self.parameters]
        wide = StageGradients(zip(self.names, masters, strict=True), self.tag)
        wide.counted = self.counted
        with torch.no_grad():
            for parameter, master in zip(self.parameters, masters, strict=True):
                if parameter.grad is not None and master.grad is not None:
                    master.grad.copy_(parameter.grad)
        return wide

    def release(self) -> None:
        """Set the gradients of all parameters to None, so that no parameter keeps these buffers in memory."""
        for parameter in self.parameters:
            parameter.grad = None

    def let_go(self) -> None:
        """Free the buffers; the gradients cannot be used any more."""
        self.release()
        self.flats, self._views = [], []

    def squares(self) -> list[float]:
        """The sum of squares of each counted parameter's gradient, in float64."""
        return [
            _sum_of_squares(parameter.grad)
            for name, parameter in zip(self.names, self.parameters, strict=True)
            if name in self.counted and parameter.grad is not None
        ]


def _flat_gradient(parameters: Sequence[Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Make a buffer of zeros, and views of it in the parameters' shapes."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    views = []
    offset = 0
    for parameter in parameters:
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        views.append(view.data)  # which counts its own writers: views share the count of their base
        offset += parameter.numel()
    return flat, views


def _sum_of_squares(gradient: Tensor) -> float:
    real = torch.view_as_real(gradient.detach()) if gradient.is_complex() else gradient.detach()
    wide = real.to(torch.float64, copy=True)
    return float(wide.square_().sum())  # in place: a second copy would be the update's largest temporary


def _is_finite(flat: Tensor) -> bool:
    """Whether no element is NaN or infinite; makes no temporary tensors.

    If all elements are finite, one sum usually shows it: the sum of elements among which there is a NaN or an infinity
    is never finite. Else the smallest and the largest element say it, each a NaN if there is one.
    """
    total = flat.sum(dtype=torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else flat.dtype)
    if torch.isfinite(total):
        return True
    least, most = torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)
    return bool(torch.isfinite(least) & torch.isfinite(most))
