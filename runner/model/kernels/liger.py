"""Liger's operators for CUDA in the place of norms, gated activations and the loss. They have never run here.

What a chain of a trace computes is compared with the formula of an operator of Liger's on small random inputs before
that stands for it. Each is a custom operator of torch's, so that profiles see it, which keeps what it reads and
computes its forward again in its backward. Weights are those of the trace. Fake tensors get shapes alone.

Source: liger-kernel 0.8.5 (Hsu et al. 2024), ``liger_kernel.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from runner.model.kernels.apart import in_own_thread
from runner.model.sharded.graph import arguments, operator

__all__ = ["NORMS", "liger_loss", "operator_of"]

NORMS = frozenset({"aten::rms_norm", "aten::layer_norm"})
"""Norms that are one operator of torch's, and of Liger's."""

_OFFSETS = (0.0, 1.0)  # what is added to the weight of a norm: Llama's and Gemma's
_ROWS, _WIDTH = 4, 16
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class _Candidate(NamedTuple):
    """An operator of Liger's that may compute what a chain does.

    Args:
        kind, numbers: which one, and what it is told beside tensors.
        values: the tensors that it takes, of which the first has rows.
        formula: what it computes of two tensors.
        scales: factors of the first tensor's random numbers, with each of which both must agree.
    """

    kind: str
    numbers: list[float]
    values: list[Node]
    formula: Callable[[Tensor, Tensor], Tensor]
    scales: tuple[float, ...] = (1.0,)


def operator_of(chain: Sequence[Node], given: Sequence[Node], graph: GraphModule) -> Node | None:
    """An operator of Liger's that computes what a chain does, behind its last one; None: there is none.

    Args:
        chain: the operators, in their order.
        given: what they read.
        graph: the chain by itself, which takes what it reads one by one.
    """
    sink = chain[-1]
    dtype = sink.meta["val"].dtype
    if dtype not in _ROUNDING or any(each.meta["val"].dtype != dtype for each in given):
        return None
    if len(chain) == 1:
        found = _of_torch(sink)
    else:
        tried = _candidates(chain, list(given)) if len(given) == 2 else ()
        found = next((each for each in tried if in_own_thread(lambda each=each: _agree(graph, given, each))), None)  # type: ignore[misc]
    if found is None:
        return None
    with sink.graph.inserting_after(sink):
        operands = (found.values, found.kind, found.numbers)
        return sink.graph.call_function(torch.ops.runner_kernels.liger.default, operands)


def _of_torch(norm: Node) -> _Candidate | None:
    """A norm of torch's over the last axis, with all its weights."""
    named = arguments(norm)
    values = [named[each] for each in ("input", "weight", "bias") if each in named]
    if operator(norm) not in NORMS or len(named["normalized_shape"]) != 1 or None in values:
        return None
    least = torch.finfo(norm.meta["val"].dtype).eps if named["eps"] is None else named["eps"]
    return _Candidate(operator(norm).removeprefix("aten::"), [least, 0.0], values, torch.add)


def _candidates(chain: Sequence[Node], given: list[Node]) -> Iterator[_Candidate]:
    sizes = sorted(([str(size) for size in node.meta["val"].shape] for node in given), key=len)
    if sizes[0] == sizes[1]:
        for values in (given, given[::-1]):
            yield _Candidate("silu", [0.0, 0.0], values, lambda value, other: functional.silu(value) * other)
            yield _Candidate("gelu", [0.0, 0.0], values, lambda value, other: _gelu(value) * other)
    if sizes[0] != sizes[1][-1:]:
        return
    values = sorted(given, key=lambda node: -int(node.meta["val"].dim()))
    for least in [each for node in chain for each in node.args if isinstance(each, float) and each > 0]:
        for offset in _OFFSETS:

            def formula(value: Tensor, weight: Tensor, least: float = least, offset: float = offset) -> Tensor:
                return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + least) * (weight + offset)

            yield _Candidate("rms_norm", [least, offset], values, formula, (1.0, least**0.5))


def _gelu(value: Tensor) -> Tensor:
    return functional.gelu(value, approximate="tanh")


def _agree(graph: GraphModule, given: Sequence[Node], candidate: _Candidate) -> bool:
    """Whether a chain gives what the formula gives of random numbers, up to their rounding."""
    generator = torch.Generator().manual_seed(0)
    dtype, rounding = given[0].meta["val"].dtype, _ROUNDING[given[0].meta["val"].dtype]
    for scale in candidate.scales:
        sizes = [(_ROWS, _WIDTH) if node.meta["val"].dim() > 1 else (_WIDTH,) for node in candidate.values]
        first, second = (torch.randn(size, generator=generator) for size in sizes)
        pair = (scale * first).to(dtype), second.to(dtype)
        try:
            made = graph(*(pair[candidate.values.index(node)] for node in given))
        except RuntimeError:  # a chain that names a device
            return False
        wanted = candidate.formula(*(each.float() for each in pair))
        if made.shape != wanted.shape or not torch.allclose(made.float(), wanted, rtol=rounding, atol=rounding):
            return False
    return True


def liger_loss(value: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int) -> Tensor:
    """The sum of the cross-entropies of a linear map's results.

    Args:
        value: what the map is given, [tokens, features].
        weight, bias: the map's.
        target: numbers of classes, [tokens].
        ignored: the class of targets that do not count.
    """
    made = _operators().LigerFusedLinearCrossEntropyFunction.apply(
        value, weight, target, bias, None, ignored, 0.0, 0.0, "sum"
    )
    return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]


def _operators() -> Any:
    return import_module("liger_kernel.ops")


def _applied(values: Sequence[Tensor], kind: str, numbers: Sequence[float]) -> Tensor:
    ops = _operators()
    if kind == "rms_norm":
        least, offset = numbers
        made = ops.LigerRMSNormFunction.apply(*values, least, offset, "gemma" if offset else "llama", False)
    elif kind == "layer_norm":
        made = ops.LigerLayerNormFunction.apply(*values, numbers[0])
    else:
        made = (ops.LigerSiLUMulFunction if kind == "silu" else ops.LigerGELUMulFunction).apply(*values)
    return made  # type: ignore[no-any-return]


@torch.library.custom_op("runner_kernels::liger", mutates_args=())
def _liger(values: list[Tensor], kind: str, numbers: list[float]) -> Tensor:
    return _applied(values, kind, numbers)


@_liger.register_fake
def _liger_of_fakes(values: list[Tensor], kind: str, numbers: list[float]) -> Tensor:
    return torch.empty_like(values[0], memory_format=torch.contiguous_format)


@torch.library.custom_op("runner_kernels::liger_backward", mutates_args=())
def _liger_backward(values: list[Tensor], gradient: Tensor, kind: str, numbers: list[float]) -> list[Tensor]:
    given = [each.detach().clone().requires_grad_() for each in values]  # over some of it Liger writes gradients
    with torch.enable_grad():
        made = _applied(given, kind, numbers)
    return [each.contiguous() for each in torch.autograd.grad(made, given, gradient.contiguous())]


@_liger_backward.register_fake
def _liger_backward_of_fakes(values: list[Tensor], gradient: Tensor, kind: str, numbers: list[float]) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in values]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, ctx.kind, ctx.numbers = inputs
    ctx.save_for_backward(*values)


def _back(ctx: Any, gradient: Tensor) -> tuple[list[Tensor], None, None]:
    return _liger_backward(list(ctx.saved_tensors), gradient, ctx.kind, ctx.numbers), None, None


_liger.register_autograd(_back, setup_context=_keep)
