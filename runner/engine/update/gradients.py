"""One stage's gradients in persistent flat buffers: zeroed, reduced and scaled as a whole.

Every ``parameter.grad`` is a view of its buffer, so that an all-reduce copies nothing, and gradients are in one place
where they are scaled: at STEP, by the step's weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.transport.base import Handle, Transport
from runner.engine.update.reducer import PlainSum, Reducer
from runner.model.tags import ParameterTag

__all__ = ["StageGradients"]


class StageGradients:
    """The gradients of trained parameters that are reduced together: those of one stage, or tied ones.

    ``reducer`` sums them over the ranks that hold them; it is a plain sum until another one is set.

    Args:
        parameters: ``(global name, parameter)`` pairs, all of them trained.
        tag: of one of them; all have its holders, and count in the gradient norm where it does. None: no other rank
            holds them.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], tag: ParameterTag | None = None) -> None:
        trained = list(parameters)
        self.tag = tag
        self.reducer: Reducer = PlainSum()
        self.names = [name for name, _ in trained]
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
    def holders(self) -> tuple[int, ...]:
        """The global ranks whose gradients are summed, ascending; empty where no other rank holds the parameters."""
        return self.tag.holders if self.tag is not None else ()

    @property
    def counted(self) -> bool:
        """Whether they are part of the gradient norm on this rank; else another rank counts its copies."""
        return self.tag is None or self.tag.is_first_copy

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

    def reduce(self, transport: Transport) -> list[Handle]:
        """Start summing over the holders, as the reducer does, once every backward has added its share."""
        return self.reducer.start(self, transport, self.holders) if len(self.holders) > 1 else []

    def start_sum(self, transport: Transport, group: Sequence[int]) -> list[Handle]:
        """Start a plain sum, in place."""
        return [transport.all_reduce(flat, group) for flat in self.flats]

    def divide(self, weight: float) -> None:
        """Turn sums into means: the one place where gradients are scaled."""
        for flat in self.flats:
            flat.div_(weight)

    def scale(self, factor: float) -> None:
        for flat in self.flats:
            flat.mul_(factor)

    def clamp(self, most: float) -> None:
        """Clip every element to ``[-most, most]``."""
        for flat in self.flats:
            flat.clamp_(-most, most)

    def are_finite(self) -> bool:
        """Whether no gradient is NaN or infinite."""
        return all(_is_finite(flat) for flat in self.flats)

    def widened(self, master_of: Callable[[Tensor], Parameter]) -> StageGradients:
        """A copy in fp32, as the gradients of master weights; it lives as long as it is held.

        Args:
            master_of: the fp32 weight that a parameter is rounded from.
        """
        masters = [master_of(parameter) for parameter in self.parameters]
        wide = StageGradients(zip(self.names, masters, strict=True), self.tag)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, masters, strict=True):
                if parameter.grad is not None and master.grad is not None:
                    master.grad.copy_(parameter.grad)
        return wide

    def release(self) -> None:
        """Let the parameters go of their gradients, and with them of these buffers."""
        for parameter in self.parameters:
            parameter.grad = None

    def squares(self) -> list[float]:
        """The sum of squares of each counted parameter's gradient, in float64."""
        if not self.counted:
            return []
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


def _is_finite(flat: Tensor) -> bool:
    """One pass without temporaries where all is well: a NaN or an infinity never leaves a finite sum."""
    total = flat.sum(dtype=torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else flat.dtype)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(flat).all())
