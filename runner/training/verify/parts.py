"""What a plain loop exchanges with those of the other parts, where ranks divide layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.transport.threads import ThreadTransport
from runner.model.load import LoadedModel
from runner.model.sharded.values import Shard
from runner.optim.states.whole_norms import part_of

__all__ = ["PartOfModel", "WholeModel"]


class WholeModel:
    """The plain loop has all weights whole."""

    index: int | None = None
    """The number of the part; None: there are no parts."""

    @property
    def is_first(self) -> bool:
        """Whether this part writes what is recorded."""
        return not self.index

    def attach(self, model: LoadedModel) -> None:
        """Let the model's operators exchange what they have with those of the other parts."""

    def agree(self, finite: bool) -> bool:
        """Whether all parts say so."""
        return finite

    def squares(self, weights: Sequence[Tensor], squares: Sequence[float]) -> list[float]:
        """The squares of all parts' gradients, each once.

        Args:
            weights: this part's weights.
            squares: the sum of squares of the gradient of each.
        """
        return list(squares)

    def joined(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the weight's global name; of parts that have none, they are zero."""
        return dict(named)


class PartOfModel(WholeModel):
    """One of several plain loops, threads of one process, each of which has a part of the weights.

    Args:
        transport: the thread's.
        degree: the number of parts.
    """

    def __init__(self, transport: ThreadTransport, degree: int) -> None:
        self.index = transport.rank
        self._transport = transport
        self._ranks = range(degree)
        self._shards: Mapping[str, Shard] = {}

    def attach(self, model: LoadedModel) -> None:
        assert model.division is not None  # the plan has divided layers
        self._shards = model.division.shards
        model.division.group.exchange = TensorGroup(self._transport, self._ranks, "ordered")

    def agree(self, finite: bool) -> bool:
        return all(bool(each) for each in self._gathered(torch.tensor(finite)))

    def squares(self, weights: Sequence[Tensor], squares: Sequence[float]) -> list[float]:
        pairs = zip(weights, squares, strict=True)
        own = [square for weight, square in pairs if self.is_first or part_of(weight) is not None]
        number = torch.tensor(len(own))
        most = max(int(each) for each in self._gathered(number))
        padded = torch.zeros(most, dtype=torch.float64)
        padded[: len(own)] = torch.tensor(own, dtype=torch.float64)
        return [square for each in self._gathered(padded) for square in each.tolist()]

    def joined(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(named)
        held = sorted(self._shards)
        reached = self._gathered(torch.tensor([name in named for name in held]))
        for name, is_anywhere in zip(held, torch.stack(reached).any(0).tolist(), strict=True):
            if is_anywhere:  # a gradient is zero where a part's experts had nothing to do
                part = named[name].detach() if name in named else torch.zeros(self._shards[name].shape)
                found[name] = self._shards[name].join(self._gathered(part.contiguous()))
        return found

    def _gathered(self, value: Tensor) -> list[Tensor]:
        with self._transport.aside():
            return self._transport.all_gather(value, self._ranks)
