"""What optimizers need of whole weights where ranks have parts of them: sums, whole tensors, and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

__all__ = ["PartOfWeight", "WholeNorms", "as_divided", "mark_as_part", "part_of"]

_PART = "part_of_weight"


class PartOfWeight(Protocol):
    """What a divided weight knows of itself. The ranks that have its parts call the same methods in the same order."""

    @property
    def degree(self) -> int:
        """The number of ranks that have a part."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...

    def whole(self, part: Tensor) -> Tensor:
        """The whole of a tensor, of which each rank gives a part as it has of the weight."""
        ...

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        ...

    def clear_padding(self, part: Tensor) -> None:
        """Set to zero, in place, the rows of a tensor like the part that the whole one does not have."""
        ...


def part_of(weight: Tensor) -> PartOfWeight | None:
    """What a divided weight knows of itself; None: it is whole."""
    return getattr(weight, _PART, None)


def as_divided(made: Parameter, weight: Tensor) -> Parameter:
    """A parameter that is updated in place of a weight, divided as that is."""
    part = part_of(weight)
    return made if part is None else mark_as_part(made, part)


def mark_as_part(made: Parameter, part: PartOfWeight) -> Parameter:
    """Let a weight know that it is a part."""
    setattr(made, _PART, part)
    return made


class WholeNorms(TorchFunctionMode):
    """Lets torch give the norms of whole tensors to an optimizer that has parts.

    The optimizer asks for norms of weights first and then, in the same order, for those of what it makes of them: their
    gradients or updates. The ranks of a group must ask for those of the same weights in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[PartOfWeight | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch._foreach_norm:
            return self._whole(args[0], made)
        return self._whole([args[0]], [made])[0] if func is torch.linalg.norm else made

    def _whole(self, tensors: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
        if all(tensor.requires_grad for tensor in tensors):
            self._parts = [part_of(tensor) for tensor in tensors]
        if len(self._parts) != len(tensors):
            raise RuntimeError("an optimizer asks for norms of other tensors than of those of its weights")
        found, parts = list(norms), {at: each for at, each in enumerate(self._parts) if each is not None}
        if parts:
            squares = torch.stack([found[at] for at in parts]).square()
            whole = next(iter(parts.values())).sum(squares).sqrt()
            for at, norm in zip(parts, whole.unbind(), strict=True):
                found[at] = norm
        return found
