"""Gives fake tensors the bytes that their own rules leave out, as real tensors have them.

torch computes the shapes of an operator's fake outputs by rules of its own. Where a kernel or a library decides how
large a storage is, such a rule may be wrong: fake tensors know no workspace of oneDNN's LSTM, which is most of what its
forward keeps, no loss that is computed in place of the mean that is returned, and no moments of norms that are wider
than their inputs. What follows from shapes is written here; what a library decides is measured once per shape, on real
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

__all__ = ["RealSizes"]

_MOST_FLOPS = 4e9
"""What one measurement may compute; sizes of longer sequences are extrapolated from shorter ones."""
_PAGE = 4096  # bytes; oneDNN begins each part of a workspace on a page
_PARTS = 8  # of a workspace, at most
_TENSORS = 7  # that are the first arguments of oneDNN's recurrent layer


class RealSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """While active inside of a mode of fake tensors, their operators return storages as large as real ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        mend = _MENDS.get(func)
        return made if mend is None or _is_traced(args) else mend(made, args)


def _is_traced(args: Sequence[Any]) -> bool:
    """Whether sizes are symbols of a trace, which asking for their values would make constants."""
    sizes = (size for each in args if isinstance(each, Tensor) for size in each.shape)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _in_storage(made: Tensor, nbytes: int) -> Tensor:
    """A tensor like a fake one, in a storage of at least so many bytes."""
    if nbytes <= made.untyped_storage().nbytes():
        return made
    storage = made.new_empty(math.ceil(nbytes / made.element_size()))
    return storage.as_strided(made.size(), made.stride())


def _with_losses(made: Tensor, args: Sequence[Any]) -> Tensor:
    """A mean or sum of losses, which lies where the losses of all elements have been computed."""
    shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return _in_storage(made, shape.numel() * made.element_size())


def _with_columns(made: Tensor, args: Sequence[Any]) -> Tensor:
    """An image made of columns, which was as large as these at first."""
    return _in_storage(made, args[0].numel() * made.element_size())


def _with_last_offset(made: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of bags of embeddings; the bag of each index was made with room for one more."""
    output, bag_of_index, *more = made
    if bag_of_index.numel():  # sums need none
        bag_of_index = _in_storage(bag_of_index, (bag_of_index.numel() + 1) * bag_of_index.element_size())
    return output, bag_of_index, *more


def _as_input_lies(made: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of a group norm; on a CPU the first one lies as its input does, which torch 2.14's rule forgets."""
    output, *moments = made
    form = suggest_memory_format(args[0])
    lies_so = output.device.type != "cpu" or output.is_contiguous(memory_format=form)
    return output if lies_so else torch.empty_like(output, memory_format=form), *moments


def _with_moments(made: Sequence[Tensor], args: Sequence[Any], *, weight: int) -> tuple[Tensor, ...]:
    """The outputs of a norm; on a CPU its moments have its weight's format, which may be wider than its input's.

    Args:
        made, args: fake outputs, and arguments.
        weight: the place of the weight among the arguments.
    """
    output, *moments = made
    if args[weight] is None or output.device.type != "cpu":
        return tuple(made)
    return output, *(torch.empty_like(each, dtype=args[weight].dtype) for each in moments)


def _of_group_norm(made: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    return _with_moments(_as_input_lies(made, args), args, weight=1)


def _as_narrow_as_input(made: Sequence[Tensor | None], args: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """The gradients of a group norm; that of its input is not as wide as a weight."""
    of_input, *more = made
    return None if of_input is None else torch.empty_like(of_input, dtype=args[1].dtype), *more


def _with_workspace(made: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of oneDNN's recurrent layer; the last one is its workspace, which its backward reads.

    Where a GPU is planned for, this workspace stands for what cuDNN reserves there, which no CPU can measure.
    """
    if not torch.is_grad_enabled():
        return tuple(made)  # it has no workspace
    tensors, (reverse, lengths, *rest) = args[:_TENSORS], args[_TENSORS:]
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return *made[:-1], made[-1].new_empty(_workspace_bytes(shapes, (reverse, tuple(lengths), *rest)))


def _with_two_biases(made: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The gradients of oneDNN's recurrent layer: those of its two biases are equal, yet two tensors."""
    layer, weight_ih, weight_hh, bias_ih, bias_hh, *states = made
    return layer, weight_ih, weight_hh, bias_ih, torch.empty_like(bias_hh), *states


_MENDS: Mapping[Any, Callable[[Any, Sequence[Any]], Any]] = {
    torch.ops.aten.mse_loss.default: _with_losses,
    torch.ops.aten.smooth_l1_loss.default: _with_losses,
    torch.ops.aten.soft_margin_loss.default: _with_losses,
    torch.ops.aten.binary_cross_entropy.default: _with_losses,
    torch.ops.aten.col2im.default: _with_columns,
    torch.ops.aten._embedding_bag.default: _with_last_offset,
    torch.ops.aten.native_batch_norm.default: partial(_with_moments, weight=1),
    torch.ops.aten.native_layer_norm.default: partial(_with_moments, weight=2),
    torch.ops.aten.native_group_norm.default: _of_group_norm,
    torch.ops.aten.native_group_norm_backward.default: _as_narrow_as_input,
    torch.ops.aten.mkldnn_rnn_layer.default: _with_workspace,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _with_two_biases,
}
"""By operator, a function from its fake outputs and its arguments to outputs with the bytes of real ones."""


@cache
def _workspace_bytes(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], settings: tuple[Any, ...]) -> int:
    """Bytes of the workspace of oneDNN's recurrent layer.

    Args:
        shapes: shape and dtype of its tensors: the input (steps, samples, features), two weights (gates times the
            hidden size, features), two biases, two states.
        settings: its other arguments.
    """
    ((steps, samples, features), dtype), ((rows, _), _), ((_, hidden), _), *_ = shapes
    longest = max(3, int(_MOST_FLOPS // max(1, 2 * samples * rows * (features + hidden))))

    def measured(length: int) -> int:
        return _measured_workspace((((length, samples, features), dtype), *shapes[1:]), settings)

    if steps <= longest:
        return measured(steps)
    long, short = measured(longest), measured(1)
    rounding = _PARTS * _PAGE
    of_a_step = (long - short + rounding) / (longest - 1)
    return math.ceil(long + (steps - longest) * of_a_step)


def _measured_workspace(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], settings: Sequence[Any]) -> int:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.enable_grad():  # without gradients there is no workspace
        tensors = [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        return int(torch.ops.aten.mkldnn_rnn_layer(*tensors, *settings)[-1].untyped_storage().nbytes())
