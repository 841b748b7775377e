"""Finds which functions with a backward of their own have the gradients that autograd would find without it.

A trace holds what a function's forward does, and leaves its backward to autograd. That is the same for a function that
writes out the derivative to be faster or to keep less, as Bloom's GELU does, and another one for a reversed gradient, a
straight-through estimator or a clipped gradient. Which one a function is is tried with drawn values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Function

__all__ = ["other_than_of_autograd"]

_SCALES = (1.0, 1e-4, 30.0, 1e4)
"""Of drawn values and gradients; what a function does at larger ones alone is not found."""
_LONGEST_AXIS = 24


def other_than_of_autograd(functions: Iterable[type[Function]], run: Callable[[], object]) -> type[Function] | None:
    """The first of some functions whose backward gives something else than autograd makes of its forward.

    Args:
        functions: classes that ``run`` applies.
        run: a forward of a model, real or fake, which shows with what the functions are called.

    Returns:
        A function that differs in one of its calls; or that cannot be tried, since it takes tensors of whole numbers or
        cannot compute with 64 bits. None if there is none.
    """
    calls: dict[type[Function], list[tuple[Any, ...]]] = {function: [] for function in functions}
    with ExitStack() as stack:
        for function, of_function in calls.items():
            stack.enter_context(_noted(function, of_function))
        if calls:
            run()
    with torch.random.fork_rng(devices=[]), unset_fake_temporarily(), torch.enable_grad():
        for function, of_function in calls.items():
            try:
                if of_function and all(_alike(function, given, scale) for given in of_function for scale in _SCALES):
                    continue
            except Exception:  # a user's code, given what it was not written for
                pass
            return function
    return None


@contextmanager
def _noted(function: type[Function], calls: list[tuple[Any, ...]]) -> Iterator[None]:
    """Note what a function's forward is given, also where its ``apply`` was bound to a name before."""
    own, forward = inspect.getattr_static(function, "forward"), function.forward
    is_inherited = "forward" not in vars(function)
    first = 0 if _takes_no_context(function) else 1

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[first:])
        return forward(*args, **kwargs)

    function.forward = staticmethod(noting)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if is_inherited:
            del function.forward
        else:
            function.forward = own  # type: ignore[method-assign]


def _alike(function: type[Function], given: tuple[Any, ...], scale: float) -> bool:
    """One comparison, on tensors of which long axes are shorter than in the call."""
    values = [_drawn(value, scale) if isinstance(value, Tensor) else value for value in given]
    asked = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    own = _tensors(function.apply(*values))  # type: ignore[no-untyped-call, unused-ignore]
    without = values if _takes_no_context(function) else [_Context(), *values]
    found = _tensors(function.forward(*without))
    if [each.requires_grad for each in own] != [each.requires_grad for each in found]:
        return False
    pairs = [(one, other) for one, other in zip(own, found, strict=True) if one.requires_grad]
    coming = [torch.randn_like(one) * scale for one, _ in pairs]
    sides = (
        torch.autograd.grad([pair[side] for pair in pairs], asked, coming, allow_unused=True, materialize_grads=True)
        for side in (0, 1)
    )
    return all(torch.allclose(one, other, rtol=1e-6, atol=1e-9 * scale) for one, other in zip(*sides, strict=True))


def _drawn(tensor: Tensor, scale: float) -> Tensor:
    if not tensor.is_floating_point():
        raise TypeError("values that stand for others cannot be drawn")
    shape = [min(size, _LONGEST_AXIS) for size in tensor.shape]
    return (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_(tensor.requires_grad)


def _tensors(made: Any) -> list[Tensor]:
    return [each for each in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(each, Tensor)]


class _Context:
    """Takes what a forward keeps for a backward of its own."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _takes_no_context(function: type[Function]) -> bool:
    return function.setup_context is not Function.setup_context
