"""Divides the weights of modules among the ranks of a group, in place, and lets the modules exchange what they must.

A module that is divided gets a class of its own, which is a subclass of the one that it had: its forward runs as it
was written, on this rank's part, between an entry and an exit. Its parameters stay the same objects.

Source of the ways: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.sharded.experts import CUTS, why_not_experts
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.operators import enter, enter_alone, gather, keep_part, leave, own_part
from runner.model.sharded.values import Shard
from runner.model.sharded.vocabulary import own_padding_index, vocabulary_embedding, whole_logits

__all__ = ["STYLES", "ShardedModule", "become", "divide", "keep_apart", "why_not"]

Pieces = int | tuple[int, ...]
"""How many maps of one length lie one behind the other in a weight, or how their lengths are to each other."""


class ShardedModule:
    """What divided modules have in common."""

    shard_group: str
    entered: bool  # whether the input is whole, of which the own features are taken
    gathered: int | None  # the features of the whole output, if it is put together again
    apart_in_training: bool  # whether it is not, in training


class _Column(ShardedModule):
    """A linear map or a convolution, each rank of which makes some of the output's features."""

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = super().forward(enter(value, self.shard_group))  # type: ignore[misc]
        if self.gathered is None:
            return made
        if self.apart_in_training and self.training:  # type: ignore[attr-defined]
            return keep_part(made, self.shard_group)
        if isinstance(self, _CONVOLUTIONS):
            return gather(made, _features_dim(self), self.shard_group)
        return whole_logits(made, self.shard_group, self.gathered)


class _Row(ShardedModule):
    """Like :class:`_Column`, each rank of which reads some of the input's features; the bias is added after the sum."""

    def forward(self, value: Tensor) -> Tensor:
        module: Any = self
        features = _features_dim(module)
        if self.entered:
            value = own_part(value, features, self.shard_group)
        bias = module._parameters["bias"]
        if _is_transposed(module):
            made = value @ module.weight
        else:
            module._parameters["bias"] = None
            try:
                made = super().forward(value)  # type: ignore[misc]
            finally:
                module._parameters["bias"] = bias
        whole: Tensor = leave(made, self.shard_group)
        if bias is None:
            return whole
        own: Tensor = bias if features == -1 else bias.reshape(-1, *[1] * (-1 - features))
        return whole + own


class _Partial(ShardedModule):
    """A module that every rank has whole, and runs on its own part of the features: the ranks' gradients are summed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        own = dict(module._parameters)
        module._parameters.update({name: _entered(each, self.shard_group) for name, each in own.items()})
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            module._parameters.update(own)


class _Experts(ShardedModule):
    """Experts, of each of which every rank has some of the hidden features; tokens go to them as on one process."""

    def forward(self, *args: Any) -> Tensor:
        given = [self._entering(each) for each in args]  # tokens, and the weights of their experts
        return leave(super().forward(*given), self.shard_group)  # type: ignore[misc]

    def _entering(self, value: Any) -> Any:
        is_value = isinstance(value, Tensor) and value.is_floating_point()
        return enter(value, self.shard_group) if is_value else value


def _entered(parameter: Tensor | None, group: str) -> Tensor | None:
    return None if parameter is None else enter_alone(parameter, group)


class _Embedding(ShardedModule):
    """An embedding, each rank of which has some of the rows. A row that another rank has counts as zeros here."""

    vocabulary_size: int

    def forward(self, ids: Tensor) -> Tensor:
        module: Any = self
        own = super().forward  # type: ignore[misc]
        return vocabulary_embedding(ids, module.weight, own, self.shard_group, self.vocabulary_size)


def _conv1d() -> type | None:
    """transformers' linear map with a transposed weight, if anything has imported it by now."""
    import sys

    found = sys.modules.get("transformers.pytorch_utils")
    return None if found is None else found.Conv1D


def _is_transposed(module: nn.Module) -> bool:
    own = _conv1d()
    return own is not None and isinstance(module, own)


@cache
def _subclass(mixin: type, own: type) -> type:
    return type(f"{mixin.__name__[1:]}{own.__name__}", (mixin, own), {"__module__": own.__module__})


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _features_dim(module: nn.Module) -> int:
    """The dimension of the features in what a linear map or a convolution reads and makes, from the end."""
    return -module.weight.dim() + 1 if isinstance(module, _CONVOLUTIONS) else -1


def _not_divisible(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, _CONVOLUTIONS):
        return None if module.groups == 1 else f"It is a {kind} of {module.groups} groups, which are not divided"
    if isinstance(module, nn.Linear) or _is_transposed(module):
        return None
    return f"It is a {kind}, and only linear maps and convolutions are divided in this way"


def _length(module: nn.Module, dim: int) -> int:
    """The length of a module's weight, also if another module that has it, too, has been divided already."""
    weight: Any = module.weight
    shard: Shard | None = getattr(weight, "shard", None)
    return int(weight.shape[dim]) if shard is None else shard.whole[dim]


def _size_names(module: nn.Module) -> tuple[str, str]:
    """The attributes with the numbers of features that a module reads and makes."""
    if isinstance(module, _CONVOLUTIONS):
        return "in_channels", "out_channels"
    return ("nx", "nf") if _is_transposed(module) else ("in_features", "out_features")


def _column_dim(module: nn.Module) -> int:
    return 1 if _is_transposed(module) else 0


def why_not(module: nn.Module, style: str, degree: int) -> str | None:
    """Why a module cannot be divided in a way among so many ranks, or None if it can."""
    name, _, number = style.partition(":")
    if name in ("whole", "partial"):
        return None
    if name == "experts":
        return why_not_experts(module, degree)
    if name == "embedding":
        if not isinstance(module, nn.Embedding):
            return f"It is a {type(module).__name__} and no embedding"
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "Rows with max_norm, scale_grad_by_freq or sparse gradients cannot be divided"
        return None if _length(module, 0) >= degree else f"It has {_length(module, 0)} rows"
    problem = _not_divisible(module)
    if problem is not None:
        return problem
    dim = _column_dim(module) if name != "row" and name != "row_whole_input" else 1 - _column_dim(module)
    size, pieces = _length(module, dim), _pieces(number)
    if name == "column_gathered" and not isinstance(module, _CONVOLUTIONS):
        return None if size >= degree else f"It has {size} output features"
    if isinstance(pieces, tuple):
        parts = ":".join(map(str, pieces))
        divides = size % sum(pieces) == 0 and not any(size // sum(pieces) * each % degree for each in pieces)
        return None if divides else f"Its {size} output features, as {parts}, cannot be divided by {degree}"
    if size % (degree * pieces):
        side = "output" if dim == _column_dim(module) else "input"
        parts = f"{pieces} x {degree}" if pieces > 1 else str(degree)
        return f"Its {size} {side} features cannot be divided by {parts}"
    return None


def _pieces(number: str) -> Pieces:
    """What a way says behind its name: how many maps are in one weight, or how their lengths are to each other."""
    lengths = tuple(int(each) for each in number.split(":") if each)
    return lengths if len(lengths) > 1 else next(iter(lengths), 1)


def divide(module: nn.Module, name: str, style: str, group: ShardGroup, shards: dict[str, Shard]) -> None:
    """Divide a module in place.

    Args:
        module: the module, whole; :func:`why_not` has nothing against it.
        name: its global name.
        style: one of :data:`STYLES`.
        group: the ranks.
        shards: the parts by the weight's global name; what is divided is added. A weight that is there already, because
            another module has it, too, is not cut again.
    """
    if isinstance(module, ShardedModule):  # under a second name
        weights: Any = module.named_parameters(recurse=False)
        known = {local: getattr(weight, "shard", None) for local, weight in weights}
        shards |= {f"{name}.{local}": shard for local, shard in known.items() if shard is not None}
        return
    kind, _, number = style.partition(":")
    STYLES[kind](module, name, _pieces(number), group, shards)


def keep_apart(module: nn.Module) -> int:
    """Let a layer with gathered features return this rank's part in training; the number of features of all ranks."""
    made: Any = module
    made.apart_in_training = True
    return int(made.gathered)


def become(module: nn.Module, mixin: type, group: ShardGroup) -> Any:
    """Give a module a class of its own, in which ``mixin`` comes before the one that it had; return it."""
    own: Any = type(module)
    module.__class__ = _subclass(mixin, own)
    made: Any = module
    made.shard_group, made.entered, made.gathered, made.apart_in_training = group.name, False, None, False
    return made


def _cut(
    module: nn.Module, local: str, name: str, dim: int, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard],
    padding: int = 0,
) -> Shard:  # fmt: skip
    parameter: Any = module._parameters[local]
    known: Shard | None = getattr(parameter, "shard", None)
    if known is None:
        shape, count = tuple(parameter.shape), 1 if isinstance(pieces, tuple) else pieces
        blocks = tuple(shape[dim] // sum(pieces) * each for each in pieces) if isinstance(pieces, tuple) else ()
        known = Shard(dim, group.index, group.degree, shape, count, padding, blocks)
        with torch.no_grad():
            parameter.data = known.cut(parameter.data)
        parameter.shard = known
    shards[f"{name}.{local}" if name else local] = known
    return known


def _column(
    module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard], *, gathered: bool = False
) -> None:
    dim = _column_dim(module)
    features = _length(module, dim)
    made, padding = become(module, _Column, group), -features % group.degree if gathered else 0
    _cut(module, "weight", name, dim, pieces, group, shards, padding)
    if module._parameters.get("bias") is not None:
        _cut(module, "bias", name, 0, pieces, group, shards, padding)
    made.gathered = features if gathered else None
    setattr(made, _size_names(module)[1], made.weight.shape[dim])


def _gathered_column(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    _column(module, name, pieces, group, shards, gathered=True)


def _row(
    module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard], *, entered: bool = False
) -> None:
    dim, made = 1 - _column_dim(module), become(module, _Row, group)
    _cut(module, "weight", name, dim, pieces, group, shards)
    made.entered = entered
    setattr(made, _size_names(module)[0], made.weight.shape[dim])


def _entering_row(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    _row(module, name, pieces, group, shards, entered=True)


def _embedding(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    made = become(module, _Embedding, group)
    rows = _length(module, 0)
    shard = _cut(module, "weight", name, 0, 1, group, shards, padding=-rows % group.degree)
    made.vocabulary_size, made.num_embeddings = rows, shard.shape[0]
    made.padding_idx = own_padding_index(made.padding_idx, made.weight, group.name)


def _partial(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    become(module, _Partial, group)


def _experts(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    become(module, _Experts, group)
    for local, (dim, blocks) in CUTS.items():
        _cut(module, local, name, dim, blocks, group, shards)


def _whole(module: nn.Module, name: str, pieces: Pieces, group: ShardGroup, shards: dict[str, Shard]) -> None:
    """Leave a module as it is."""


STYLES: Mapping[str, Callable[[nn.Module, str, Pieces, ShardGroup, dict[str, Shard]], None]] = {
    "column": _column,
    "packed_column": _column,
    "column_gathered": _gathered_column,
    "row": _row,
    "row_whole_input": _entering_row,
    "embedding": _embedding,
    "partial": _partial,
    "experts": _experts,
    "whole": _whole,
}
"""The ways in which a module is divided, by name.

``column``: each rank makes some of the output features of a linear map or of a convolution, whose features are its
channels; ``packed_column:N``: the same for N maps that lie
one behind the other in one weight; ``packed_column:4:2:2``: for maps whose lengths are to each other as 4 to 2 to 2.
``row``: each rank reads some of the input features, and the ranks sum.
``embedding``: each rank has some of the rows. ``column_gathered`` and ``row_whole_input`` are for neighbours that are
whole. ``partial``: whole, and used on this rank's own part, as a norm of each head is: the ranks' gradients are summed.
``experts``: all experts of a mixture in two weights, of each of which each rank has some of the hidden features.
``whole``: as it is.
"""
