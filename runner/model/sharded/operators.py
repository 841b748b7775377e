"""What ranks that share a layer's weights exchange, as operators that autograd, exports and fake tensors know.

Each is a pair: one thing in the forward, another one in the backward. They are torch's custom operators and no
``autograd.Function``, because ``torch.export`` leaves a function's backward out without a word.

Source of the pairs: Shoeybi et al. 2019 (Megatron-LM), section 3, and Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


@torch.library.custom_op("runner_shards::identity", mutates_args=())
def _identity(value: Tensor, group: str) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)  # a custom operator may not return its argument


@torch.library.custom_op("runner_shards::all_reduce", mutates_args=())
def _all_reduce(value: Tensor, group: str) -> Tensor:
    return group_of(group).exchange.all_reduce(value.contiguous())


@torch.library.custom_op("runner_shards::all_reduce_max", mutates_args=())
def _all_reduce_max(value: Tensor, group: str) -> Tensor:
    return group_of(group).exchange.all_reduce_max(value.contiguous())


@torch.library.custom_op("runner_shards::all_gather", mutates_args=())
def _all_gather(value: Tensor, dim: int, partial: bool, group: str) -> Tensor:
    return group_of(group).exchange.all_gather(value.contiguous(), dim)


@torch.library.custom_op("runner_shards::reduce_scatter", mutates_args=())
def _reduce_scatter(value: Tensor, dim: int, group: str) -> Tensor:
    place = group_of(group)
    place.part_of(value.shape[dim])  # every rank refuses, before one waits for others
    return place.exchange.reduce_scatter(value.contiguous(), dim)


@torch.library.custom_op("runner_shards::entry", mutates_args=())
def _entry(part: Tensor, whole: Tensor, group: str) -> Tensor:
    return whole.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("runner_shards::own", mutates_args=())
def _own(value: Tensor, dim: int, group: str) -> Tensor:
    return group_of(group).own(value, dim).clone(memory_format=torch.contiguous_format)


@_identity.register_fake
@_all_reduce.register_fake
@_all_reduce_max.register_fake
def _same(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_all_gather.register_fake
def _longer(value: Tensor, dim: int, partial: bool, group: str) -> Tensor:
    shape = list(value.shape)
    shape[dim] *= group_of(group).degree
    return value.new_empty(shape)


@_entry.register_fake
def _as_whole(part: Tensor, whole: Tensor, group: str) -> Tensor:
    return torch.empty_like(whole, memory_format=torch.contiguous_format)


def _shorter(value: Tensor, dim: int, group: str) -> Tensor:
    shape = list(value.shape)
    shape[dim] = group_of(group).part_of(shape[dim])
    return value.new_empty(shape)


_reduce_scatter.register_fake(_shorter)
_own.register_fake(_shorter)


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


_entry.register_autograd(_entry_back, setup_context=_note_group)
_identity.register_autograd(_sum_back, setup_context=_note_group)
_all_reduce.register_autograd(_identity_back, setup_context=_note_group)
_all_gather.register_autograd(_gather_back, setup_context=_note_gather)
_reduce_scatter.register_autograd(_scatter_back, setup_context=_note_dim)
_own.register_autograd(_scatter_back, setup_context=_note_dim)


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
    return _identity(value, group)  # type: ignore[no-any-return]


def leave(value: Tensor, group: str) -> Tensor:
    """The sum of the ranks' parts of a value; its gradient, which all ranks have, is that of each part."""
    _end(group)
    return _all_reduce(value, group)  # type: ignore[no-any-return]


def gather(value: Tensor, dim: int, group: str) -> Tensor:
    """The whole of a value of which each rank has a part along ``dim``, for readers that are the same on all ranks."""
    _end(group)
    return _all_gather(value, dim % value.dim(), False, group)  # type: ignore[no-any-return]


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
    return _all_gather(value, dim % value.dim(), True, group)  # type: ignore[no-any-return]


def scatter_sum(value: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part, along ``dim``, of the sum of the ranks' values."""
    _end(group)
    return _reduce_scatter(value, dim % value.dim(), group)  # type: ignore[no-any-return]


def own_part(value: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part, along ``dim``, of a value that all ranks have."""
    return _own(value, dim % value.dim(), group)  # type: ignore[no-any-return]


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
