"""One stage's gradients in persistent flat buffers: zeroed, reduced and scaled as a whole.

Every ``parameter.grad`` is a view of its buffer, so that an all-reduce copies nothing, and gradients are in one place
where they are scaled: at STEP, by the step's weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.transport import Handle, Transport

__all__ = ["StageGradients"]


class StageGradients:
    """The gradients of the trainable parameters of one stage.

    Args:
        parameters: ``(global name, parameter)`` pairs; frozen ones are left out.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        by_kind: dict[tuple[torch.dtype, torch.device], list[Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_kind[parameter.dtype, parameter.device].append(parameter)
        self.flats: list[Tensor] = []
        self._views: list[tuple[Parameter, Tensor]] = []
        for members in by_kind.values():
            flat, views = _flat_gradient(members)
            self.flats.append(flat)
            self._views += zip(members, views, strict=True)
        self.claim()

    @property
    def num_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def claim(self) -> None:
        """Make every ``grad`` its view again: others (Lightning does, before training) may have set them to None.

        What they put there instead is dropped; the buffers are zero between steps.
        """
        for parameter, view in self._views:
            if parameter.grad is not view:
                parameter.grad = view

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def reduce(self, transport: Transport, group: Sequence[int]) -> list[Handle]:
        """Start summing over the replicas that hold this stage."""
        return [transport.all_reduce(flat, group) for flat in self.flats]

    def divide(self, weight: float) -> None:
        """Turn sums into means: the one place where gradients are scaled."""
        for flat in self.flats:
            flat.div_(weight)

    def scale(self, factor: float) -> None:
        for flat in self.flats:
            flat.mul_(factor)

    def squares(self) -> list[float]:
        """The sum of squares of each parameter's gradient, in float64."""
        return [_sum_of_squares(parameter.grad) for parameter in self.parameters if parameter.grad is not None]


def _flat_gradient(parameters: Sequence[Parameter]) -> tuple[Tensor, list[Tensor]]:
    """A buffer of zeros and its views in the parameters' shapes."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    views = []
    offset = 0
    for parameter in parameters:
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    return flat, views


def _sum_of_squares(gradient: Tensor) -> float:
    return float(gradient.detach().double().pow(2).sum())
