"""What an optimizer needs that does not describe itself, seen in steps on small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.model.fake import fake_tensors
from runner.model.live_tracker import LiveTracker
from runner.optim.build import observed_state_bytes
from runner.profile import OwnUpdate

__all__ = ["observed_update", "state_bytes_of_shape"]

_SHAPE = 128, 128
_STEPS = 2  # the first makes the states
_SLACK = 1 / 16  # of a tensor, which scalars, rows and columns are


def state_bytes_of_shape(make: Callable[[list[Tensor]], Optimizer], shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of the state of a tensor of this shape, observed in a step on one without memory.

    Raises:
        Exception: the optimizer asks for values of tensors.
    """
    with fake_tensors():
        return observed_state_bytes(make, torch.empty(shape, dtype=dtype))


def observed_update(make: Callable[[list[Tensor]], Optimizer]) -> OwnUpdate:
    """What updates make and drop, observed with one, two and three tensors of one size."""
    one, two, three = (_made_and_dropped(make, count) for count in (1, 2, 3))
    at_once = max(0.0, three - two)
    at_once = at_once if at_once > _SLACK else 0.0
    return OwnUpdate(
        temporaries=math.ceil(max(0.0, one - at_once) - _SLACK),
        lingering=math.ceil(max(0.0, two - one - at_once) - _SLACK),
        at_once=at_once,
        in_groups=_has_groups(make),
    )


def _has_groups(make: Callable[[list[Tensor]], Optimizer]) -> bool:
    """Whether a matrix and a vector are in groups of their own, as those with and without a decay are."""
    try:
        optimizer = make([torch.nn.Parameter(torch.ones(shape)) for shape in (_SHAPE, _SHAPE[:1])])
    except Exception:  # it may want matrices alone
        return False
    return sum(bool(group["params"]) for group in optimizer.param_groups) > 1


def _made_and_dropped(make: Callable[[list[Tensor]], Optimizer], count: int) -> float:
    """The most bytes that a step on so many tensors has beside what it keeps, in tensors."""
    generator = torch.Generator().manual_seed(0)
    weights: list[Tensor] = [torch.nn.Parameter(torch.randn(_SHAPE, generator=generator)) for _ in range(count)]
    optimizer, most = make(weights), 0
    with LiveTracker() as tracker:
        for _ in range(_STEPS):
            for weight in weights:
                weight.grad = torch.randn(_SHAPE, generator=generator)
            before = tracker.live
            tracker.reset_peak()
            optimizer.step()
            most = max(most, tracker.peak - max(before, tracker.live))
    return most / weights[0].nbytes
