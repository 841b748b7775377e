"""Compares what a run has made with what a plain loop has made: to the bit, or to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from plain_reference import Result, Task
from torch import Tensor

_ROUNDING = 1e-3
"""The share of a tensor's largest gradient below which an element may be rounding."""
_OF_WAY = 0.1
"""The most by which a weight of such a run may differ, as a share of the way that the tensor's largest has gone."""


class WrongError(AssertionError):
    """A request that does not fulfil what it must."""


def require_tensors(
    got: Mapping[str, Sequence[Tensor]], wanted: Mapping[str, Tensor], same: Callable[..., bool], what: str
) -> None:
    if missing := [name for name in wanted if name not in got]:
        raise WrongError(f"no {what} of {missing[0]}")
    largest = max((float(each.abs().max()) for each in wanted.values() if each.numel()), default=0.0)
    for name, tensor in wanted.items():
        for own in got[name]:
            if not same(own, tensor, largest):
                most = float((own.double() - tensor.double()).abs().max()) if own.shape == tensor.shape else "shape"
                raise WrongError(f"the {what} of {name} differs from the plain loop's by {most}")


def require_moved(got: Mapping[str, Tensor], expected: Result) -> None:
    """The weights that a run has saved, put together from parts, are where the plain loop's are, as far as gradients
    were more than rounding: an optimizer that divides by a gradient's size moves by rounding as far as by others."""
    for name, begin in expected.begins.items():
        found = [each[name] for each in expected.gradients if name in each]
        counts = [each.abs() > _ROUNDING * each.abs().max() for each in found if each.numel()]
        if not found or not counts:
            continue
        told = torch.stack(counts).all(0)
        way = (expected.weights[name] - begin).abs().max()
        off = ((got[name].double() - expected.weights[name].double()).abs() * told).max()
        if not off <= _OF_WAY * way + 1e-7:
            raise WrongError(f"the weight {name} has moved by {way}, and ends {off} from the plain loop's")


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, by which parts of a tensor are compared with the whole."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()


def same_bits(own: Tensor, wanted: Tensor, largest: float) -> bool:
    return torch.equal(own, wanted) or bool(torch.equal(own.isnan(), wanted.isnan()) and own.isnan().any())


def is_narrow(task: Task) -> bool:
    """Whether numbers have fewer than 32 bits."""
    return torch.float32 not in (task.dtype, task.autocast or task.dtype) or task.autocast is not None


def close(own: Tensor, wanted: Tensor, largest: float, task: Task) -> bool:
    share = 5e-2 if is_narrow(task) else 1e-4
    return torch.allclose(own.double(), wanted.double(), rtol=share, atol=share * largest + 1e-8)
