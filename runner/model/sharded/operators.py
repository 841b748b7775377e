"""What ranks that share a layer's weights exchange, as operators that autograd, exports and fake tensors know.

Each is a pair: one thing in the forward, another one in the backward. They are torch's custom operators and no
``autograd.Function``, because ``torch.export`` leaves a function's backward out without a word. Where nothing records
or replaces operators, a call goes past torch.library, which needs more time for it than a small sum: then it is a
function that does the same.

Source of the pairs: Shoeybi et al. 2019 (Megatron-LM), section 3, and Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd import Function

from runner.model.sharded.group import group_of

__all__ = [
    "drawn_apart",
    "enter",
    "enter_alone",
    "gather",
    "gather_parts",
    "gather_slices",
    "largest",
    "keep_part",
    "leave",
    "own_part",
    "scatter_sum",
]


def _identity_body(value: Tensor, group: str) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)  # a custom operator may not return its argument


def _all_reduce_body(value: Tensor, group: str) -> Tensor:
    return group_of(group).exchange.all_reduce(value.contiguous())


@torch.library.custom_op("runner_shards::all_reduce_max", mutates_args=())
def _all_reduce_max(value: Tensor, group: str) -> Tensor:
    return group_of(group).exchange.all_reduce_max(value.contiguous())


def _all_gather_body(value: Tensor, dim: int, partial: bool, group: str) -> Tensor:
    return group_of(group).exchange.all_gather(value.contiguous(), dim)


def _reduce_scatter_body(value: Tensor, dim: int, group: str) -> Tensor:
    place = group_of(group)
    place.part_of(value.shape[dim])  # every rank refuses, before one waits for others
    return place.exchange.reduce_scatter(value.contiguous(), dim)


def _entry_body(part: Tensor, whole: Tensor, group: str) -> Tensor:
    return whole.clone(memory_format=torch.contiguous_format)


def _own_body(value: Tensor, dim: int, group: str) -> Tensor:
    return group_of(group).own(value, dim).clone(memory_format=torch.contiguous_format)


def _operator(name: str, body: Callable[..., Tensor]) -> CustomOpDef:
    return torch.library.custom_op(f"runner_shards::{name}", body, mutates_args=())


_identity_op, _all_reduce_op = _operator("identity", _identity_body), _operator("all_reduce", _all_reduce_body)
_all_gather_op, _reduce_scatter_op = (
    _operator("all_gather", _all_gather_body),
    _operator("reduce_scatter", _reduce_scatter_body),
)
_entry_op, _own_op = _operator("entry", _entry_body), _operator("own", _own_body)


@_identity_op.register_fake
@_all_reduce_op.register_fake
@_all_reduce_max.register_fake
def _same(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_all_gather_op.register_fake
def _longer(value: Tensor, dim: int, partial: bool, group: str) -> Tensor:
    shape = list(value.shape)
    shape[dim] *= group_of(group).degree
    return value.new_empty(shape)


@_entry_op.register_fake
def _as_whole(part: Tensor, whole: Tensor, group: str) -> Tensor:
    return torch.empty_like(whole, memory_format=torch.contiguous_format)


def _shorter(value: Tensor, dim: int, group: str) -> Tensor:
    shape = list(value.shape)
    shape[dim] = group_of(group).part_of(shape[dim])
    return value.new_empty(shape)


_reduce_scatter_op.register_fake(_shorter)
_own_op.register_fake(_shorter)


def _note_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[-1]


def _note_dim(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.group = inputs[1], inputs[-1]


def _note_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.partial, ctx.group = inputs


def _sum_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _all_reduce(gradient, ctx.group), None


def _identity_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


def _gather_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    part = _reduce_scatter if ctx.partial else _own
    return part(gradient, ctx.dim, ctx.group), None, None, None


def _entry_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _reduce_scatter(gradient, 0, ctx.group), None, None


def _scatter_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _all_gather(gradient, ctx.dim, False, ctx.group), None, None


def _is_plain(value: Tensor) -> bool:
    """Whether nothing but autograd sees what is done with a tensor: no mode, no trace and no transform."""
    return (
        type(value) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
    )


def _pair(
    operator: CustomOpDef, body: Callable[..., Tensor], note: Callable[..., None], back: Callable[..., Any]
) -> Callable[..., Tensor]:
    """A pair as something to call: the operator, or a function where the value is plain."""
    operator.register_autograd(back, setup_context=note)

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        made = body(*inputs)
        note(ctx, inputs, made)
        return made

    name = f"GeneratedBackwardFor_{operator._opoverload}"  # as torch.library calls it
    kind = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(back)})
    apply: Callable[..., Tensor] = kind.apply  # type: ignore[attr-defined]

    def call(*inputs: Any) -> Tensor:
        if _is_plain(inputs[0]):
            return apply(*inputs) if torch.is_grad_enabled() else body(*inputs)
        made: Tensor = operator(*inputs)
        return made

    return call


_PLAIN = (Tensor, torch.nn.Parameter)
_entry = _pair(_entry_op, _entry_body, _note_group, _entry_back)
_identity = _pair(_identity_op, _identity_body, _note_group, _sum_back)
_all_reduce = _pair(_all_reduce_op, _all_reduce_body, _note_group, _identity_back)
_all_gather = _pair(_all_gather_op, _all_gather_body, _note_gather, _gather_back)
_reduce_scatter = _pair(_reduce_scatter_op, _reduce_scatter_body, _note_dim, _scatter_back)
_own = _pair(_own_op, _own_body, _note_dim, _scatter_back)


def enter(value: Tensor, group: str) -> Tensor:
    """A value that all ranks have, for layers of which each rank has a part; the gradients of the parts are summed.

    Layers that read the same tensor share one entry: their gradients are summed here before the ranks sum theirs, once.
    """
    place = group_of(group)
    made = place.known(value)
    if made is None:
        part = place.part_behind(value)
        made = _identity(value, group) if part is None else _entry(part, value, group)
        place.remember(value, made)
    place.draw_apart(value.device)
    return made


def enter_alone(value: Tensor, group: str) -> Tensor:
    """The same for a value that nothing else reads, such as a weight."""
    return _identity(value, group)


def leave(value: Tensor, group: str) -> Tensor:
    """The sum of the ranks' parts of a value; its gradient, which all ranks have, is that of each part."""
    _end(group)
    return _all_reduce(value, group)


def gather(value: Tensor, dim: int, group: str) -> Tensor:
    """The whole of a value of which each rank has a part along ``dim``, for readers that are the same on all ranks."""
    _end(group)
    return _all_gather(value, dim % value.dim(), False, group)


def keep_part(value: Tensor, group: str) -> Tensor:
    """A value of which each rank has a part, for readers that take the part."""
    _end(group)
    return value


def gather_slices(value: Tensor, group: str) -> Tensor:
    """All samples, of which each rank has a part, for readers that are the same on all ranks.

    Layers that are divided and read them sum the gradients of all samples and get those of their own in one exchange.
    """
    made = gather(value, 0, group)
    group_of(group).remember_part(made, value)
    return made


def gather_parts(value: Tensor, dim: int, group: str) -> Tensor:
    """The same for readers of which each rank has a part: the gradients of the whole are summed, and divided again."""
    return _all_gather(value, dim % value.dim(), True, group)


def scatter_sum(value: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part, along ``dim``, of the sum of the ranks' values."""
    _end(group)
    return _reduce_scatter(value, dim % value.dim(), group)


def own_part(value: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part, along ``dim``, of a value that all ranks have."""
    return _own(value, dim % value.dim(), group)


def _end(group: str) -> None:
    """Note that layers of which each rank has a part have run."""
    place = group_of(group)
    place.forget()
    place.draw_together()


def drawn_apart(group: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operator gives that draws numbers for this rank's own features, such as an attention with dropout."""
    place = group_of(group)
    place.draw_apart(args[0].device)
    try:
        return operator(*args, **kwargs)
    finally:
        place.draw_together()


def largest(value: Tensor, group: str) -> Tensor:
    """The largest of all ranks' elements; it has no gradient."""
    return _all_reduce_max(value.detach(), group)  # type: ignore[no-any-return]
