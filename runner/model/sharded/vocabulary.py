"""Embeddings and the cross-entropy of which each rank has a part of the vocabulary: rows of one, columns of the other.

Rank i of t has the ids from i · rows up to (i + 1) · rows, where rows · t is the vocabulary's size or more: what lies
beyond it is padding, whose weights nothing reads and whose logits count as -inf.

Source of the formulas: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.model.sharded.group import group_of
from runner.model.sharded.operators import gather, largest, leave, scatter_sum

__all__ = ["own_padding_index", "vocabulary_cross_entropy", "vocabulary_embedding", "whole_logits"]


@torch.library.custom_op("runner_shards::own_ids", mutates_args=())
def _own_ids(ids: Tensor, rows: int, size: int, ignored: int | None, group: str) -> tuple[Tensor, Tensor]:
    """The ids counted from this rank's first one, and where they are another rank's; there the number is 0."""
    outside = (ids < 0) | (ids >= size)
    if ignored is not None:
        outside &= ids != ignored
    if ids.device.type != "cpu":
        torch._assert_async(~outside.any())  # does not wait for the device, as torch's own look-ups do not
    elif bool(outside.any()):
        bad = ids[outside]
        found = f"the largest is {int(bad.max())}" if int(bad.max()) >= size else f"the smallest is {int(bad.min())}"
        raise IndexError(f"of ids that must be from 0 to {size - 1}, {found}")
    shifted = ids.long() - group_of(group).index * rows
    foreign = (shifted < 0) | (shifted >= rows) | outside
    if ignored is not None:
        foreign |= ids == ignored
    return shifted.masked_fill_(foreign, 0), foreign


@_own_ids.register_fake
def _own_ids_shapes(ids: Tensor, rows: int, size: int, ignored: int | None, group: str) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.shape, dtype=torch.long), ids.new_empty(ids.shape, dtype=torch.bool)


@torch.library.custom_op("runner_shards::exponentials", mutates_args=())
def _exponentials(
    logits: Tensor, top: Tensor, own: Tensor, foreign: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - top) [n, rows] with zeros from ``columns`` on, its sums [n], and the targets' logits - top [n]."""
    tops = top.unsqueeze(1)  # a difference of two types would make a copy of its own besides
    shifted = logits - tops if logits.dtype == tops.dtype else logits.to(tops.dtype).sub_(tops)
    chosen = shifted.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill_(foreign, 0)
    exponentials = shifted.exp_()
    exponentials.narrow(1, columns, exponentials.shape[1] - columns).zero_()
    return exponentials, exponentials.sum(1), chosen


@_exponentials.register_fake
def _exponentials_shapes(
    logits: Tensor, top: Tensor, own: Tensor, foreign: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    return top.new_empty(logits.shape), top.new_empty(top.shape), top.new_empty(top.shape)


def _keep_exponentials(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, own, foreign, _ = inputs
    ctx.dtype = logits.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], own, foreign)


def _exponentials_back(
    ctx: Any, of_exponentials: Tensor | None, of_sums: Tensor | None, of_chosen: Tensor | None
) -> tuple[Tensor, None, None, None, None]:
    """(p - 1[target]) · g, where g / sum arrives for the sums and -g for the targets' own logits."""
    exponentials, own, foreign = ctx.saved_tensors
    if of_exponentials is not None or of_sums is None or of_chosen is None:
        raise RuntimeError("the cross-entropy of a divided vocabulary has no second derivative")
    gradient = exponentials * of_sums.unsqueeze(1)
    gradient.scatter_add_(1, own.unsqueeze(1), of_chosen.masked_fill(foreign, 0).unsqueeze(1))
    return gradient.to(ctx.dtype), None, None, None, None


_exponentials.register_autograd(_exponentials_back, setup_context=_keep_exponentials)


def vocabulary_cross_entropy(
    logits_part: Tensor, targets: Tensor, group_name: str, vocabulary_size: int, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy in nats, and the number of targets that count, the same on every rank.

    In fp32 or, for logits of fp64, in that. The ranks exchange three numbers per target in the forward, and nothing in
    the backward, for which each keeps exp(logits - their largest) of its columns.

    Args:
        logits_part: this rank's columns [..., rows] of the logits [..., vocabulary], padding included.
        targets: ids [...], all of them on every rank.
        group_name: names the ranks' :class:`~runner.model.sharded.group.ShardGroup`.
        vocabulary_size: without padding.
        ignore_index: targets that do not count.

    Raises:
        IndexError: a target is no id of the vocabulary.
        TypeError: the targets are probabilities, which need whole logits.
    """
    if targets.is_floating_point():
        raise TypeError("targets that are probabilities need whole logits, of which each rank has a part")
    logits, flat = logits_part.flatten(0, -2), targets.flatten()
    rows = logits.shape[1]
    columns = min(max(vocabulary_size - group_of(group_name).index * rows, 0), rows)
    own, foreign = _own_ids(flat, rows, vocabulary_size, ignore_index, group_name)
    top = largest(_largest_of_rows(logits.detach().narrow(1, 0, columns)), group_name)
    _, sums, chosen = _exponentials(logits, top, own, foreign, columns)
    losses = leave(sums, group_name).log() - leave(chosen, group_name)
    ignored = flat == ignore_index
    return losses.masked_fill(ignored, 0).sum(), torch.count_nonzero(~ignored)


def _largest_of_rows(logits: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if not logits.shape[1]:  # nothing but padding
        return logits.new_full(logits.shape[:1], -torch.inf, dtype=dtype)
    return logits.amax(1).to(dtype)


def whole_logits(logits_part: Tensor, group_name: str, vocabulary_size: int) -> Tensor:
    """The logits of the whole vocabulary, without padding, on every rank: what other losses and metrics read."""
    return gather(logits_part, -1, group_name).narrow(-1, 0, vocabulary_size)


def vocabulary_embedding(
    ids: Tensor,
    weight_part: Tensor,
    own_forward: Callable[[Tensor], Tensor],
    group_name: str,
    vocabulary_size: int,
    scatter_dim: int | None = None,
) -> Tensor:
    """The vectors of the ids: each rank looks up those it has the rows of, and the ranks' results are summed.

    Args:
        ids: [...], all of them on every rank.
        weight_part: this rank's rows, padding included.
        own_forward: the module's forward by which it looks ids up in ``weight_part``; it may do more, such as scale.
            ``padding_idx`` must be :func:`own_padding_index`. ``max_norm`` and ``scale_grad_by_freq`` cannot be: they
            would count the first row for every id of another rank.
        group_name: names the ranks' :class:`~runner.model.sharded.group.ShardGroup`.
        vocabulary_size: without padding.
        scatter_dim: the dimension of the vectors along which each rank takes its part of them; None: all take all.

    Raises:
        IndexError: an id is none of the vocabulary's.
    """
    own, foreign = _own_ids(ids, weight_part.shape[0], vocabulary_size, None, group_name)
    vectors = own_forward(own).masked_fill(foreign.unsqueeze(-1), 0)
    return leave(vectors, group_name) if scatter_dim is None else scatter_sum(vectors, scatter_dim, group_name)


def own_padding_index(padding_idx: int | None, weight_part: Tensor, group_name: str) -> int | None:
    """The number, among this rank's rows, of the row that takes no gradient; None if another rank has it."""
    rows = weight_part.shape[0]
    if padding_idx is None or padding_idx // rows != group_of(group_name).index:
        return None
    return padding_idx % rows
