"""Sums the gradients of one stage over the ranks that hold it.

A :class:`Reducer` is called once per step, when the last backward of the stage has ended. The sum is complete when STEP
has waited for all handles that the reducer returned. It works in place, on the stage's flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from runner.engine.transport.base import Handle, Transport

if TYPE_CHECKING:
    from runner.engine.update.gradients import StageGradients

__all__ = ["LocalGradients", "PlainSum", "Reducer", "ReducerState", "agree_on_finite"]

ReducerState = Mapping[str, Mapping[str, Tensor]]
"""The tensors that a reducer keeps from step to step, by the parameter's global name and then by the reducer's keys."""


class Reducer(Protocol):
    """Sums one stage's gradients over a group of ranks.

    Every rank of the group calls every method in the same order, and must get the same numbers. Gradients are sums over
    micro-batches that are not yet divided by the step's weight. If the gradients of a step are not finite on some rank,
    a reducer must make the sums of this step not finite on all ranks. The transport that it is given counts what is
    sent.
    """

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        """Start summing ``gradients.flats`` in place; the caller waits for the returned handles, in their order.

        Args:
            gradients: the stage's gradients.
            transport: this rank's transport.
            group: two or more global ranks, ascending; this rank is one of them.
        """
        ...

    def settle(self, applied: bool) -> None:
        """Note that the step has ended; if its sums were not applied, what is kept must be as before the step.

        It is called without a sum, too, where a step was dropped before it.
        """
        ...

    def state_dict(self) -> ReducerState:
        """The tensors that this replica keeps; the next step may overwrite them. Empty if the reducer keeps nothing.

        A parameter has the same keys on every replica. If a checkpoint is read by another number of replicas, each of
        them gets the mean over the replicas that wrote it.
        """
        ...

    def load_state_dict(self, state: ReducerState) -> None:
        """Copy the tensors that :meth:`state_dict` returned; parameters that are not in ``state`` begin anew."""
        ...


class PlainSum:
    """Sums gradients as they are, without compression, and keeps nothing from step to step."""

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        return gradients.start_sum(transport, group)

    def settle(self, applied: bool) -> None:
        """Do nothing, because a plain sum keeps nothing."""

    def state_dict(self) -> ReducerState:
        return {}

    def load_state_dict(self, state: ReducerState) -> None:
        """Do nothing, because a plain sum keeps nothing."""


class LocalGradients(PlainSum):
    """Does not sum gradients in some steps: there the ranks agree only on whether all gradients are finite.

    In all other steps it is a plain sum.

    Args:
        stays_local: returns whether the gradients of the current step are not summed; the same on every rank.
    """

    def __init__(self, stays_local: Callable[[], bool]) -> None:
        self._stays_local = stays_local

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        if not self._stays_local():
            return super().start(gradients, transport, group)
        return [_Agreement(gradients.flats, gradients.are_finite(), transport, group)]


def agree_on_finite(gradients: StageGradients, transport: Transport, group: Sequence[int]) -> bool:
    """Whether the gradients of all ranks of the group are finite; if not, make those of this rank not finite.

    A reducer that keeps tensors asks this before it changes them. It sends a small message and waits for the answer.
    """
    agreement = _Agreement(gradients.flats, gradients.are_finite(), transport, group)
    agreement.wait()
    return agreement.all_finite


class _Agreement:
    """If gradients are not finite on one rank, makes them not finite on all ranks, so that all have one verdict."""

    def __init__(self, flats: Sequence[Tensor], finite: bool, transport: Transport, group: Sequence[int]) -> None:
        self._flats = flats
        self._found = torch.tensor([float(not finite)], device=transport.device)
        self._handle = transport.all_reduce(self._found, group)
        self.all_finite = False

    def wait(self) -> None:
        self._handle.wait()
        self.all_finite = not self._found.item()
        if not self.all_finite:
            for flat in self._flats:
                flat[:1] = torch.nan

    def is_completed(self) -> bool:
        return self._handle.is_completed()
