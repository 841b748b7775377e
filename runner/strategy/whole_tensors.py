"""Puts together what ranks hold in parts, for files, and takes a rank's part of what files hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runner.checkpoint.parts import DividedTensor, put_together
from runner.engine.engine import Engine
from runner.model.sharded.values import Shard

__all__ = ["cut", "joined"]

Value = TypeVar("Value")


def joined(named: Mapping[str, Value], engine: Engine) -> dict[str, Value]:
    """Tensors, or nests of them such as optimizer states, of whole weights; on the first rank of a group, else nothing.

    All ranks that divide layers together must call it with the same divided weights.

    Args:
        named: tensors or nests by the weight's global name; what has the shape of a part is joined with the others'.
        engine: this rank's.
    """
    ranks, transport = engine.view.shards, engine.transport
    if len(ranks) == 1:
        return dict(named)
    whole: dict[str, Value] = {}
    for name, value in named.items():
        shard = engine.tags[name].shard if name in engine.tags else None  # a buffer has no tag
        if shard is None:
            whole[name] = value
            continue

        def put_together(part: Tensor, shard: Shard = shard) -> Tensor:
            with _disable_current_modes():  # it is the host's, for a file, and not memory of the device
                there = part.detach().to(transport.device).contiguous()
                return shard.join(transport.all_gather(there, ranks)).cpu()

        whole[name] = _mapped(put_together, shard.shape, value)
    return whole if engine.view.is_first_shard else {}


def cut(named: Mapping[str, Value], engine: Engine) -> dict[str, Value]:
    """This rank's parts of tensors, or of nests of them, by the weight's global name; the inverse of `joined`.

    What is still in parts of other ranks, as a checkpoint has them, is put together, one tensor after the other.
    """
    shards = {name: tag.shard for name, tag in engine.tags.items() if tag.shard is not None}
    return {
        name: put_together(value) if name not in shards else _mapped(shards[name].cut, shards[name].whole, value)
        for name, value in named.items()
    }


def _mapped(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], value: Any) -> Any:
    """A nest in which the function has been applied to the tensors of a shape."""
    if isinstance(value, DividedTensor):
        value = value.whole()
    if isinstance(value, Tensor):
        return function(value) if tuple(value.shape) == shape else value
    if isinstance(value, Mapping):
        return {key: _mapped(function, shape, each) for key, each in value.items()}
    return value
