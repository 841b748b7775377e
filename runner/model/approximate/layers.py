"""Runs a layer so that torch's activation functions and linear maps keep less for the backward.

Functions are recognised where they are called, by modules of ``torch.nn``, functions and operators of traces. Without
autograd everything is as it was. A layer that runs again in its backward makes the same choices: they follow from the
seed of torch's generator, which the engine sets for each layer and micro-batch, and draw no number from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from runner.model.approximate.few_bits import few_bit
from runner.model.approximate.four_bits import four_bit_linear
from runner.model.approximate.randomized_linear import randomized_linear

__all__ = ["Approximation"]

_ACTIVATIONS: Mapping[Any, str] = {
    functional.gelu: "gelu",
    torch.ops.aten.gelu.default: "gelu",
    functional.silu: "silu",
    torch.ops.aten.silu.default: "silu",
    functional.mish: "mish",
    torch.ops.aten.mish.default: "mish",
    functional.selu: "selu",
    torch.selu: "selu",
    functional.relu: "relu",
    torch.relu: "relu",
    Tensor.relu: "relu",
    torch.ops.aten.relu.default: "relu",
    functional.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    torch.ops.aten.sigmoid.default: "sigmoid",
    functional.tanh: "tanh",
    torch.tanh: "tanh",
    Tensor.tanh: "tanh",
    torch.ops.aten.tanh.default: "tanh",
}
_LINEAR = (functional.linear, torch.ops.aten.linear.default)


@dataclass
class Approximation:
    """What is approximated in the backward of layers.

    Args:
        bits: bits of each element that activation functions keep; None: they keep what torch keeps.
        ratio: share of the rows of their input that linear maps keep; None: all.
        four_bits: whether linear maps compute with numbers of four bits, forward and backward.
        found: ``bits``, ``four_bits`` and ``ratio``, as far as a call was approximated by them.
    """

    bits: int | None = None
    ratio: float | None = None
    four_bits: bool = False
    found: set[str] = field(default_factory=set)

    def around(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, a layer, with this approximation."""

        def run(value: Any) -> Any:
            if not torch.is_grad_enabled() and not self.four_bits:
                return function(value)
            with _Mode(self):
                return function(value)

        return run


class _Mode(TorchFunctionMode):
    """Sees every function of torch that one layer calls, in one forward."""

    def __init__(self, what: Approximation) -> None:
        super().__init__()
        self._what = what
        self._linears = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or self._what.four_bits:
            activation = _ACTIVATIONS.get(func) if self._what.bits is not None else None
            if activation is not None and _is_differentiable(args) and not kwargs.get("inplace"):
                return self._activate(activation, func, args, kwargs)
            if func in _LINEAR and (self._what.ratio is not None or self._what.four_bits):
                return self._map(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _activate(self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        assert self._what.bits is not None
        self._what.found.add("bits")
        form = kwargs.get("approximate", "none")
        name = name if form == "none" else f"{name}_{form}"
        call = partial(func, **kwargs)
        return few_bit(name, lambda value: call(value, *args[1:]), args[0], self._what.bits)

    def _map(self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._what.four_bits and (not weight.requires_grad or input.dim() < 2):
            return func(input, weight, bias)  # type: ignore[no-any-return]
        self._linears += 1
        seed = torch.default_generator.initial_seed() ^ self._linears
        if self._what.ratio is None:
            self._what.found.add("four_bits")
            return four_bit_linear(input, weight, bias, seed=seed)
        self._what.found.add("ratio")
        return randomized_linear(input, weight, bias, ratio=self._what.ratio, seed=seed)


def _is_differentiable(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad and args[0].is_floating_point()
