"""A device of a given speed on a machine that is faster: each layer waits when it has computed.

So steps are measured whose seconds do not depend on what else the machine does, and a link of a given speed carries
tensors beside a device that computes at a given speed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.model.boundary import flatten, map_tensors
from runner.model.layers import LayerSource
from runner.profile import LayerProfile, ModelProfile
from runner.profiling.timing import time_layers

__all__ = ["STEP_SECONDS", "paced", "step_flops", "with_flops_as_seconds"]

STEP_SECONDS = 2.0
"""What a step that keeps everything takes on the slow device: many times what these models need by themselves."""


def step_flops(profile: ModelProfile) -> float:
    """FLOPs of a forward and backward that keep everything."""
    return sum(row.forward_flops + row.backward_flops for row in (*profile.layers, profile.loss))


def with_flops_as_seconds(profile: ModelProfile, flops_per_second: float) -> ModelProfile:
    """The profile with the seconds of a device of this speed."""

    def of(layer: LayerProfile) -> LayerProfile:
        forward, backward = layer.forward_flops / flops_per_second, layer.backward_flops / flops_per_second
        return replace(layer, forward_seconds=forward, backward_seconds=backward)

    return replace(profile, layers=tuple(map(of, profile.layers)), loss=of(profile.loss))


def paced(
    sources: Sequence[LayerSource],
    profile: ModelProfile,
    batch: tuple[Any, Any],
    loss: Callable[..., Tensor],
    step_seconds: float,
) -> list[LayerSource]:
    """The layers on a slow device, where each takes its part of a step's seconds by its FLOPs.

    What a layer computes by itself is measured first; it waits for the rest, in each forward and each backward.

    Args:
        sources: the layers.
        profile: their FLOPs.
        batch: the first layer's input, and the targets.
        loss: takes the last layer's output and the targets.
        step_seconds: what a step that keeps everything takes.
    """
    # Timing changes batch norm's statistics.
    sources = [replace(source, build=partial(copy.deepcopy, source.build())) for source in sources]
    alone = time_layers(profile, sources, batch, loss, dtype=torch.float32)
    slow = with_flops_as_seconds(profile, step_flops(profile) / step_seconds)
    made = []
    for source, row, own in zip(sources, slow.layers, alone.layers, strict=True):
        forward = max(0.0, row.forward_seconds - own.forward_seconds)
        backward = max(0.0, row.backward_seconds - own.backward_seconds)
        made.append(replace(source, around=_Waiting(forward, backward)))
    return made


class _Waiting:
    """Wraps a layer's function, which then takes seconds more, forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        self._forward, self._backward = forward, backward

    def __call__(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def forward(value: Any) -> Any:
            time.sleep(self._forward)  # at the beginning, as a layer that runs again stops when it has what is needed
            given = self._slow_backward(value)  # it waits when the layer's backward has given its input a gradient
            output = function(given)
            return output if given is not value else self._slow_backward(output)

        return forward

    def _slow_backward(self, value: Any) -> Any:
        """The same, with a backward that waits behind its first tensor that has one; ``value`` itself if none has."""
        first = next((tensor for tensor in flatten(value)[0] if tensor.requires_grad), None)
        if first is None or not torch.is_grad_enabled():
            return value
        waiting = _WaitBackward.apply(first, self._backward)  # type: ignore[no-untyped-call]
        return map_tensors(lambda tensor: waiting if tensor is first else tensor, value)


class _WaitBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None
