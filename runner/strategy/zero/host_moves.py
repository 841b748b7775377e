"""Measures how long DeepSpeed moves gradients, states and weights to the host's memory, or to a drive, and back.

DeepSpeed moves gradients in hooks of the backward, and updated weights within its step, in the middle of other work.
Therefore single copies are measured: those of which one side is in the host's memory, made by DeepSpeed's own methods
for it. If the device is the CPU, the same methods copy between the buffers that stand for device and host, and these
copies are measured. The update itself is not: the wrapped optimizer is left out. Weights that ZeRO 3 fetches from the
host for a layer (``offload.parameters``) are moved by another stream while the device computes, and are not measured.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["measure_moves"]

Moving = Callable[[], AbstractContextManager[None]]

_COPYING = (
    *("async_accumulate_grad_in_cpu_via_gpu", "async_inplace_copy_grad_to_fp32_buffer_from_gpu"),  # ZeRO 1 and 2
    *("partition_grads", "_offload_grad_partition_at_boundary"),  # ZeRO 3
    "step",
)
_SWAPPING = ("swap_in_optimizer_state", "swap_out_optimizer_state", "swap_out_gradients")


def measure_moves(optimizer: Any, moving: Moving) -> None:
    """Measure what one stage's DeepSpeed optimizer moves, if its states are offloaded.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        moving: makes the context in which tensors are moved, which measures how long that takes.
    """
    if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
        return
    copies = _HostCopies(moving)
    _wrap(optimizer, _COPYING, copies.inside)
    _wrap(optimizer, ["_optimizer_step"], copies.outside)
    if getattr(optimizer, "optimizer_swapper", None) is not None:
        _wrap(optimizer.optimizer_swapper, _SWAPPING, lambda call: _within(moving, call))


def _wrap(owner: Any, names: Iterable[str], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the methods of these names that the object has."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, wrap(getattr(owner, name)))


def _within(context: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        with context():
            return call(*given, **named)

    return called


class _HostCopies(TorchFunctionMode):
    """Measures ``copy_`` and ``to`` between the host's memory and a device, in calls that are marked."""

    def __init__(self, moving: Moving) -> None:
        super().__init__()
        self._moving = moving
        self._is_off = False

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, of which copies are measured."""
        return _within(lambda: self, call)

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, of which no copies are measured, although the call around it is measured."""

        @wraps(call)
        def called(*given: Any, **named: Any) -> Any:
            before, self._is_off = self._is_off, True
            try:
                return call(*given, **named)
            finally:
                self._is_off = before

        return called

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_off or not _is_move(function, args, kwargs or {}):
            return function(*args, **kwargs or {})
        with self._moving():
            return function(*args, **kwargs or {})


def _is_move(function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    if function is Tensor.copy_:
        return any(tensor.device.type == "cpu" for tensor in given[:2] if isinstance(tensor, Tensor))
    if function is Tensor.to:
        target = named.get("device", given[1] if len(given) > 1 else None)
        return isinstance(target, torch.device | str) and torch.device(target).type != given[0].device.type
    return False
