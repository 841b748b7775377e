"""Counts floating-point operations by torch's formulas, and leaves every operator whole.

torch's own ``FlopCounterMode`` takes operators apart that have no formula. The parts of ``silu_backward``, for example,
allocate more than the operator does, so that memory counted below that mode is not the memory of a real run. And it
has no formula for the CPU's attention and LSTM, which is what fake tensors of a model for another machine run, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from runner.model.sharded.group import draws_apart, exchange_kind, group_of
from runner.model.traced.cuts import draws_with
from runner.profile import Exchange

__all__ = ["FlopCounter", "operator_flops"]


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active, in forwards and in backwards.

    Attributes:
        total: floating-point operations so far; a multiplication with an addition is two.
        draws_apart: whether random numbers were drawn of which ranks that divide a layer have their own.
        exchanged: how often ranks that divide a layer have exchanged a tensor, by kind and bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: float = 0.0
        self.draws_apart = False
        self.exchanged: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.total += operator_flops(func, args, kwargs or {}, made)
        self.draws_apart |= draws_apart() and draws_with(func, args, kwargs or {})
        kind = exchange_kind(func)
        if kind is not None:
            gathered = group_of(args[-1]).degree if kind == "all_reduce_max" else 1
            self.exchanged[kind, gathered * max(args[0].nbytes, made.nbytes)] += 1
        return made

    def exchanges(self) -> tuple[Exchange, ...]:
        """What has been exchanged, as a profile holds it."""
        return tuple(Exchange(kind, size, count) for (kind, size), count in self.exchanged.items())


def operator_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> float:
    """The floating-point operations of one call of an operator; 0 if there is no formula for it.

    Args:
        operator: the operator, as a dispatch mode is given it.
        args, kwargs: its arguments.
        made: what it has returned.
    """
    packet = getattr(operator, "overloadpacket", None)
    formula = _formula(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=made))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = gradient.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _recurrent(layer: Tensor, weight_ih: Tensor, weight_hh: Tensor, *_: Any, **__: Any) -> int:
    """The matrix products of oneDNN's LSTM: each step multiplies each sample's input and state by a weight.

    Source: Hochreiter and Schmidhuber, Long Short-Term Memory, 1997, in the form that ``torch.nn.LSTM`` documents;
    torch counts the same products where it unrolls the steps, and like it, this counts no element-wise operations.
    """
    steps, samples, _features = layer.shape
    return 2 * steps * samples * (weight_ih.numel() + weight_hh.numel())


def _recurrent_backward(layer: Tensor, weight_ih: Tensor, weight_hh: Tensor, *_: Any, **__: Any) -> int:
    """Of each product, the gradients of both factors; oneDNN always computes all of them."""
    return 2 * _recurrent(layer, weight_ih, weight_hh)


def _chunked_head(value: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """The logits, and at once the gradients of what they are made of: a product each, as far as they are wanted."""
    of_value, of_weight, _of_bias = rest[-3:]
    return 2 * value.shape[0] * weight.numel() * (1 + bool(of_value) + bool(of_weight))


def _formula(packet: Any) -> Any:
    """The formula of an operator, or None. Torch registers its chunked head when that is first used."""
    if packet is getattr(torch.ops.torch_nn, "_linear_cross_entropy_batch_chunked", None):
        return _chunked_head
    return _OF_THE_CPU.get(packet) or flop_registry.get(packet)


_OF_THE_CPU: dict[Any, Any] = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
