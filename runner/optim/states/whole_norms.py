"""Norms of whole weights, where ranks have parts of weights, for optimizers that ask torch for norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

__all__ = ["SUM_OVER_PARTS", "WholeNorms", "as_divided"]

SUM_OVER_PARTS = "sum_over_parts"
"""The attribute of a divided weight that sums a tensor over the ranks which have its parts."""


def as_divided(made: Parameter, weight: Tensor) -> Parameter:
    """A parameter that is updated in place of a weight, divided as that is."""
    if hasattr(weight, SUM_OVER_PARTS):
        setattr(made, SUM_OVER_PARTS, getattr(weight, SUM_OVER_PARTS))
    return made


class WholeNorms(TorchFunctionMode):
    """Lets torch give the norms of whole tensors to an optimizer that has parts.

    The optimizer asks for norms of weights first and then, in the same order, for those of what it makes of them: their
    gradients or updates. The ranks of a group must ask for those of the same weights in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch._foreach_norm:
            return self._whole(args[0], made)
        return self._whole([args[0]], [made])[0] if func is torch.linalg.norm else made

    def _whole(self, tensors: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
        if all(isinstance(tensor, Parameter) for tensor in tensors):
            self._sums = [getattr(tensor, SUM_OVER_PARTS, None) for tensor in tensors]
        if len(self._sums) != len(tensors):
            raise RuntimeError("an optimizer asks for norms of other tensors than of those of its weights")
        found, places = list(norms), [at for at, each in enumerate(self._sums) if each is not None]
        if places:
            squares = torch.stack([found[at] for at in places]).square()
            for at, norm in zip(places, self._sums[places[0]](squares).sqrt().unbind(), strict=True):
                found[at] = norm
        return found
