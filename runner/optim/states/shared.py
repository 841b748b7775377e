"""Optimizer states sharded over replicas that hold the same weights and gradients: ZeRO's first stage.

The weights of a group are concatenated in a flat tensor. Each replica updates its part and holds the states of that
part only; then all gather the other parts. The update must be elementwise, because a part may begin and end anywhere in
a weight; the result then equals the unsharded update bit for bit. What is computed with a weight may depend in its last
bit on where the weight begins in memory. So weights of whole cache lines come first in the flat tensor, and begin where
torch would let them begin; only weights of other sizes, of which large models have no matrix, may begin elsewhere.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.optim.compression.signs import Exchange
from runner.optim.states.settings import apply_settings

__all__ = ["SharedStates"]

_CACHE_LINE = 64  # bytes; torch lets every tensor begin at a multiple of it

States = Mapping[Tensor, Mapping[str, Any]]


class SharedStates:
    """Takes over an optimizer, whose groups then hold this replica's parts; their settings are kept.

    Args:
        optimizer: elementwise, still without states.
        exchange: sends messages to the stage's other replicas; all of them must call every method in the same order.
    """

    def __init__(self, optimizer: Optimizer, exchange: Exchange) -> None:
        self._optimizer = optimizer
        self._exchange = exchange
        self._flats: list[_FlatWeights] = []
        for group in optimizer.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                kinds[parameter.dtype, parameter.device].append(parameter)
            flats = [_FlatWeights(members, exchange.size, exchange.rank) for members in kinds.values()]
            group["params"] = [flat.own for flat in flats]
            self._flats += [flat for flat in flats if flat.own.numel()]  # a stage may have nothing to train

    @property
    def gathered_bytes(self) -> int:
        """Bytes that this replica sends in one update."""
        return sum(flat.own.nbytes for flat in self._flats) * (self._exchange.size - 1)

    @torch.no_grad()
    def step(self) -> None:
        """Update this replica's part from the weights' gradients, and gather the others' updated parts."""
        for flat in self._flats:
            flat.take_gradients()
        self._optimizer.step()
        for flat in self._flats:
            flat.own.grad = None
            flat.put(self._exchange.all_gather(flat.own.detach()))

    def whole(self) -> dict[Tensor, dict[str, Any]]:
        """The states of every weight, on the CPU; empty before the first update."""
        found: dict[Tensor, dict[str, Any]] = {}
        for flat in self._flats:
            for key, value in self._optimizer.state.get(flat.own, {}).items():
                if _is_shared_out(value):
                    parts: Iterable[tuple[Parameter, Any]] = flat.cut(torch.cat(self._exchange.all_gather(value)).cpu())
                else:
                    parts = [(parameter, value) for parameter in flat.parameters]
                for parameter, part in parts:
                    found.setdefault(parameter, {})[key] = part.clone() if isinstance(part, Tensor) else part
        return found

    def load(self, states: States, settings: Sequence[Mapping[str, Any]]) -> None:
        """Load this replica's part of the states of every weight, and the settings of the groups."""
        apply_settings(self._optimizer, settings)
        for flat in self._flats:
            if flat.parameters[0] not in states:
                continue
            own: dict[str, Any] = {}
            for key, value in states[flat.parameters[0]].items():
                if _is_shared_out(value):
                    own[key] = flat.own_part([states[parameter][key] for parameter in flat.parameters])
                else:
                    own[key] = value.clone() if isinstance(value, Tensor) else value
            self._optimizer.state[flat.own] = own


class _FlatWeights:
    """Weights of one dtype and device, concatenated and padded to equal parts.

    Attributes:
        own: this replica's part: a view of the tensor of which the weights are views.
    """

    def __init__(self, parameters: Sequence[Parameter], size: int, rank: int) -> None:
        self.parameters = sorted(parameters, key=lambda each: each.numel() * each.element_size() % _CACHE_LINE != 0)
        first = self.parameters[0]
        part = -(-sum(parameter.numel() for parameter in self.parameters) // size)
        self._flat = torch.zeros(part * size, dtype=first.dtype, device=first.device)
        self._part, self._rank = part, rank
        for parameter, place in self.cut(self._flat):
            place.copy_(parameter.detach())
            parameter.data = place
        self.own = Parameter(self._slice(self._flat))

    def take_gradients(self) -> None:
        """Copy this replica's part of the weights' gradients."""
        self.own.grad = self.own_part([parameter.grad for parameter in self.parameters])

    def put(self, parts: Sequence[Tensor]) -> None:
        """Copy the other replicas' parts into the weights."""
        for number, part in enumerate(parts):
            if number != self._rank:
                self._flat[number * self._part : (number + 1) * self._part].copy_(part)

    def own_part(self, whole: Sequence[Tensor | None]) -> Tensor:
        """This replica's part of per-weight values, in the order of the weights; zeros for missing values."""
        made = torch.zeros_like(self._flat[: self._part])
        low = self._rank * self._part
        offset = -low
        for parameter, value in zip(self.parameters, whole, strict=True):
            start, end = max(0, offset), min(self._part, offset + parameter.numel())
            if value is not None and start < end:
                made[start:end].copy_(value.reshape(-1)[start - offset : end - offset])
            offset += parameter.numel()
        return made

    def cut(self, flat: Tensor) -> Iterator[tuple[Parameter, Tensor]]:
        """Each weight and the part of a flat tensor that belongs to it, in the weight's shape."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()

    def _slice(self, flat: Tensor) -> Tensor:
        return flat[self._rank * self._part : (self._rank + 1) * self._part]


def _is_shared_out(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
