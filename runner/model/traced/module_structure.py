"""Describes modules as values that are equal for two modules which compute the same with other weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.dense_parts import dense_parts
from runner.model.traced.segments import Segment
from runner.model.traced.structure import Itself

__all__ = ["form_of", "structure_of"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def structure_of(module: nn.Module) -> Hashable:
    """All that makes a module what it is, except the values of its weights and buffers.

    Numbers, texts, containers and modules are compared by what they hold, segments of a traced model by their graphs,
    anything else by identity: two modules that are equal may be taken as one, and two that are alike may be unequal.
    """
    return _described(module, {})


def _described(value: Any, seen: dict[int, int]) -> Hashable:
    """A description that can be compared; ``seen`` numbers modules and weights, which may occur several times."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, nn.Module):
        if id(value) in seen:
            return "module", seen[id(value)]
        seen[id(value)] = len(seen)
        if isinstance(value, Segment):
            return type(value), value.structure(partial(_weight, seen=seen))
        parts = ((key, _attribute(key, each, seen)) for key, each in sorted(vars(value).items()))
        return type(value), tuple(parts)
    if isinstance(value, list | tuple):
        return type(value), tuple(_described(each, seen) for each in value)
    if isinstance(value, Mapping):
        return type(value), tuple((_described(key, seen), _described(each, seen)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_described(each, seen) for each in value)
    return Itself(value)


def _attribute(key: str, value: Any, seen: dict[int, int]) -> Hashable:
    if key not in ("_parameters", "_buffers"):
        return _described(value, seen)
    return tuple((name, None if each is None else _weight(each, seen)) for name, each in value.items())


def _weight(tensor: Tensor, seen: dict[int, int]) -> Hashable:
    return type(tensor), form_of(tensor), seen.setdefault(id(tensor), len(seen))


def form_of(tensor: Tensor) -> Hashable:
    """All that is known of a tensor but its values."""
    is_dense = tensor.layout is torch.strided
    places = tensor.stride() if is_dense else (tensor.layout, *(part.shape for part in dense_parts([tensor])))
    return tuple(tensor.shape), places, tensor.dtype, tensor.device, tensor.requires_grad
