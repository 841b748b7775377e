"""Fake tensors with which a whole run can be played: what steers it is real, values that it asks for are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from runner.model.fake import fake_tensors

__all__ = ["PlayedTensors", "changed_in_place"]

_STEERING = frozenset({torch.int32, torch.int64, torch.bool})
_MOST_STEERING = 1024  # elements; larger whole numbers are a model's
_EQUAL = torch.ops.aten.equal.default
_SET = frozenset({torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset})
_VALUE = torch.ops.aten._local_scalar_dense.default


class PlayedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """The mode in which every tensor is fake, but for small ones of whole numbers that are made of real ones alone.

    A fake tensor whose value is asked for is a quarter (of whole numbers 1, a flag: true), unless it was made of a
    constant. So losses, weights and norms are finite and above 0, a run takes every step, and what ranks ask of each
    other beside their losses is rounded to nothing.
    """

    def __init__(self) -> None:
        fake_tensors()  # quiet, and such tensors can be copied
        super().__init__(allow_non_fake_inputs=True, static_shapes=True)
        self._all_fake = False

    @contextmanager
    def all_fake(self) -> Iterator[None]:
        """Within it, every tensor that is made is fake; the mode must be active."""
        before, self._all_fake = self._all_fake, True
        try:
            yield
        finally:
            self._all_fake = before

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor like a real one, also of whole numbers; the mode must be active."""
        with self.all_fake():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in given):
            if self._steers(given, args, kwargs):
                return func(*args, **kwargs)
        elif func is _VALUE and given[0].constant is None:  # type: ignore[attr-defined]
            kind = given[0].dtype
            return True if kind is torch.bool else 0.25 if kind.is_floating_point else 1
        elif func is _EQUAL:
            return given[0].shape == given[1].shape
        self.cache_enabled = func not in _SET  # torch's cache would keep the memory that it is given alive
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _steers(self, given: list[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator on real tensors, or one that makes a tensor of sizes, is of what steers the run."""
        if self._all_fake:
            return False
        if given:
            return all(each.dtype in _STEERING and each.numel() <= _MOST_STEERING for each in given)
        sizes = [math.prod(each) if isinstance(each, list | tuple) else each for each in args]
        is_small = all(isinstance(each, int) and 0 < abs(each) <= _MOST_STEERING for each in sizes)
        return is_small and kwargs.get("dtype") in _STEERING


@contextmanager
def changed_in_place() -> Iterator[None]:
    """Let ``nn.Module.to`` and the like change fake parameters in place, as they do with real ones.

    Torch would swap them, and cannot where something watches them.
    """
    own = nn.Module._apply
    nn.Module._apply = _apply_in_place  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]


def _apply_in_place(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(change)  # type: ignore[no-untyped-call]
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = change(parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module
