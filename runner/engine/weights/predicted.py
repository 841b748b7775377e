"""Fills weights of one stage by prediction, for its forwards and backwards.

The optimizer updates the stage's own parameters. Forwards and backwards use leaf sets with memory of their own, into
which predictions are written. Two ways of use differ in what a backward reads:

- what its forward has read. Each distinct prediction has a leaf set, until the step of its window is made. In a flushed
  schedule there is one for each step;
- another prediction, made when the backward runs. Then there is one leaf set, which is filled before each forward and
  each backward. Autograd does not see that its memory changes in between, so that the backward computes with the new
  weights, and with the activations of the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from runner.engine.weights.store import LeafSet, StageWeights, new_leaf
from runner.model.layers import StageModule
from runner.schedule.gaps import StageGaps

__all__ = ["Foresight", "PredictedWeights"]


class Foresight(Protocol):
    """Predicts weights from the states of their optimizer; see :class:`runner.optim.forecast.Forecast`."""

    def predict(self, parameter: Parameter, gap: float, *, newest: int, step: int) -> Tensor:
        """The weight ``gap`` optimizer steps ahead of ``newest``, for a micro-batch of ``step``."""
        ...

    def learn(self, parameter: Parameter, before: Tensor, decay: float) -> None:
        """Take a step's change of a weight into the average of changes, which keeps ``decay`` of what it was."""
        ...


_Key = tuple[float, int, int]
"""Gap, newest version and step of a prediction: equal keys mean equal weights."""


class PredictedWeights(StageWeights):
    """Predicts the weights of one stage; see the module's text.

    Args:
        module: the stage, which owns the newest weights.
        gaps: how far ahead.
        overlaps: whether windows overlap, so that several are under way.
        decay: decay of the average of the weights' changes; None: it is not kept.

    Attributes:
        predictions: how often the weights have been predicted.
        foresight: predicts weights; it is set when there is an optimizer.
    """

    def __init__(self, module: StageModule, gaps: StageGaps, *, overlaps: bool, decay: float | None = None) -> None:
        super().__init__(module)
        self.predictions = 0
        self.foresight: Foresight | None = None
        self._gaps, self._overlaps, self._decay = gaps, overlaps, decay
        self.start_at(0)

    @property
    @override
    def held(self) -> Sequence[Tensor]:
        sets = [*self._keyed.values(), *self._spare, self._live]
        copies = [tensor for _, tensors in self._once.values() for tensor in tensors]
        return [*(leaf.data for leaves in sets for leaf in leaves.values()), *copies]

    @override
    def start_at(self, version: int) -> None:
        """Set the version of the stage's parameters, whose values may have changed, and forget all predictions."""
        self.newest = version
        self.forget()

    @override
    def forget(self) -> None:
        """Drop all predictions and their memory."""
        self._keyed: dict[_Key, LeafSet] = {}
        self._spare: list[LeafSet] = []
        self._live: LeafSet = {}
        self._content: _Key | None = None  # what the live leaf set contains
        self._once: dict[bool, tuple[_Key, list[Tensor]]] = {}  # by whether it is for backwards
        self._key_of: dict[tuple[int, int], _Key] = {}  # window and number of a micro-batch -> what its forward reads

    @override
    def leased(self, window: int, number: int = 0, *, backward: bool = False) -> AbstractContextManager[None]:
        if self._gaps.backward is None:
            return self._lent(self._of_forward(window, number))
        self._fill_live(window, number, backward=backward)
        return self._lent(self._live)

    @override
    def before_step(self, window: int) -> None:
        if self._decay is not None:
            self._allocate_live()
            self._content = None  # it keeps the weights before the step until the next forward or backward
            for parameter, leaf in self._live.items():
                leaf.data.copy_(parameter.data)

    @override
    def after_step(self) -> None:
        self.newest += 1
        for parameter, leaf in self._live.items() if self._decay is not None else ():
            assert self.foresight is not None
            self.foresight.learn(parameter, leaf.data, self._decay or 0.0)

    def _key(self, window: int, gap: float | None) -> _Key:
        return (window - self.newest if gap is None else gap, self.newest, window)

    def _of_forward(self, window: int, number: int) -> LeafSet:
        """The leaf set that the forward of a micro-batch uses, and its recomputation and its backward."""
        key = self._key_of.setdefault((window, number), self._key(window, self._gaps.forward))
        if key not in self._keyed:
            self._drop_ended(self.newest if self._overlaps else window)
            leaves = self._spare.pop() if self._spare else self._new_leaves()
            self._predict([leaf.data for leaf in leaves.values()], key)
            self._keyed[key] = leaves
        return self._keyed[key]

    def _drop_ended(self, first: int) -> None:
        """Drop what windows before ``first`` have used: they have ended."""
        self._spare += [self._keyed.pop(key) for key in list(self._keyed) if key[2] < first]
        self._key_of = {place: key for place, key in self._key_of.items() if place[0] >= first}

    def _fill_live(self, window: int, number: int, *, backward: bool) -> None:
        """Write the prediction for a forward or backward into the live leaf set."""
        self._allocate_live()
        key = self._backward_key(window, number) if backward else self._forward_key(window, number)
        memory = [leaf.data for leaf in self._live.values()]
        if self._gaps.once:
            key = self._predict_once(window, key, backward=backward)
        if key == self._content:
            return
        if self._gaps.once:
            for into, values in zip(memory, self._once[backward][1], strict=True):
                into.copy_(values)
        else:
            self._predict(memory, key)
        self._content = key

    def _forward_key(self, window: int, number: int) -> _Key:
        key = self._key(window, self._gaps.forward)
        if self._gaps.goes_back:
            self._key_of[window, number] = key
        return key

    def _backward_key(self, window: int, number: int) -> _Key:
        if self._gaps.goes_back:
            _, read, _ = self._key_of.pop((window, number))
            return self._key(window, read - self.newest)
        return self._key(window, self._gaps.backward)

    def _predict_once(self, window: int, key: _Key, *, backward: bool) -> _Key:
        """Predict if this is the first such action of its window; return the key of what the window uses."""
        kept = self._once.get(backward)
        if kept is not None and kept[0][2] == window:
            return kept[0]
        memory = [torch.empty_like(parameter.data) for parameter in self._trained] if kept is None else kept[1]
        self._predict(memory, key)
        self._once[backward] = key, memory
        return key

    @torch.no_grad()
    def _predict(self, memory: Sequence[Tensor], key: _Key) -> None:
        gap, newest, step = key
        assert self.foresight is not None  # training has an optimizer
        for parameter, into in zip(self._trained, memory, strict=True):
            into.copy_(self.foresight.predict(parameter, gap, newest=newest, step=step))
        self.predictions += 1

    def _allocate_live(self) -> None:
        if not self._live:
            self._live = self._new_leaves()

    def _new_leaves(self) -> LeafSet:
        return {parameter: new_leaf(parameter, torch.empty_like(parameter.data)) for parameter in self._trained}
