"""How the gradients of one stage are summed over the ranks that hold it.

A :class:`Reducer` is asked once per step, when the last backward of the stage has ended; the sum is complete when its
handles have been waited for, at STEP. It works in place, on the stage's flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from runner.engine.transport.base import Handle, Transport

if TYPE_CHECKING:
    from runner.engine.update.gradients import StageGradients

__all__ = ["LocalGradients", "PlainSum", "Reducer", "ReducerState", "agree_on_finite", "ring_bytes"]

ReducerState = Mapping[str, Mapping[str, Tensor]]
"""What a reducer keeps from one step to the next: by the global name of a parameter, then by a key of its own."""


class Reducer(Protocol):
    """Sums one stage's gradients over a group of ranks.

    Every rank of the group calls every method in the same order, and must end with the same numbers. Gradients are
    sums over micro-batches, not yet divided by the step's weight. A reducer that keeps something must leave it as it
    was in a step whose gradients are not finite on some rank, and make the sums of that step not finite on all of them.
    """

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent so far."""
        ...

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        """Start summing ``gradients.flats`` in place; whoever called waits for the handles in their order.

        Args:
            gradients: of the stage.
            transport: this rank's.
            group: two or more global ranks, rising, this one among them.
        """
        ...

    def state_dict(self) -> ReducerState:
        """What is this replica's own, as tensors that the next step may write to; empty where nothing is kept.

        Every parameter of the stage has the same keys. A checkpoint that is read by another number of replicas gives
        each of them the mean over the replicas that were.
        """
        ...

    def load_state_dict(self, state: ReducerState) -> None:
        """Copy what :meth:`state_dict` gave; parameters that are not in it start anew."""
        ...


def ring_bytes(num_bytes: int, ranks: int) -> float:
    """What one rank sends in an all-reduce of ``num_bytes`` over a ring of ``ranks``: 2 (R - 1) / R of them."""
    return 2 * (ranks - 1) / ranks * num_bytes


class PlainSum:
    """Sends gradients as they are, and keeps nothing."""

    def __init__(self) -> None:
        self.bytes_sent = 0.0

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        self.bytes_sent += ring_bytes(gradients.num_bytes, len(group))
        return gradients.start_sum(transport, group)

    def state_dict(self) -> ReducerState:
        return {}

    def load_state_dict(self, state: ReducerState) -> None:
        """Nothing: nothing is kept."""


class LocalGradients(PlainSum):
    """Leaves each rank its own gradients in some steps, and agrees on whether all are finite; else a plain sum.

    Args:
        stays_local: whether the gradients of the step that ends are to stay each rank's own; the same on every rank.
    """

    def __init__(self, stays_local: Callable[[], bool]) -> None:
        super().__init__()
        self._stays_local = stays_local

    def start(self, gradients: StageGradients, transport: Transport, group: Sequence[int]) -> list[Handle]:
        if not self._stays_local():
            return super().start(gradients, transport, group)
        return [_Agreement(gradients.flats, gradients.are_finite(), transport, group)]


def agree_on_finite(gradients: StageGradients, transport: Transport, group: Sequence[int]) -> bool:
    """Whether the gradients of all ranks of the group are finite; where not, this rank's are made not finite.

    What a reducer that keeps something asks before it changes what it keeps. A small message, which is waited for.
    """
    agreement = _Agreement(gradients.flats, gradients.are_finite(), transport, group)
    agreement.wait()
    return agreement.all_finite


class _Agreement:
    """Gradients that are not finite on one rank become so on all, which then come to one verdict."""

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
