"""Finds models that compute in another way each time, from numbers of which torch knows nothing.

What Python's or NumPy's generators give, the time, and a counter of a model's own reach torch as plain numbers, arrays
or new tensors. A trace holds those of one run. So a forward runs twice with the same random numbers of torch, and what
torch is given is compared.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from runner.model.walk import Walk

__all__ = ["other_each_time"]

_LARGEST_BYTES = 1 << 24  # of a tensor whose values are compared


def other_each_time(model: Any, run: Callable[[], object]) -> str | None:
    """What a forward takes from elsewhere than its inputs, its weights and torch's generator; None if nothing.

    Args:
        model: what the forward runs; it and what can be reached from it may change.
        run: runs the forward, which has run before, so that caches are full. It may draw from torch's generators.

    Returns:
        the end of a sentence that begins with "Its forward", such as "draws from NumPy's generator".
    """
    walk = Walk([("", model)], 0)
    python, numpy = random.getstate(), repr(np.random.get_state())
    one, another = (_given(run, walk.tensors) for _ in range(2))
    if random.getstate() != python:
        return "draws from Python's random"
    if repr(np.random.get_state()) != numpy:
        return "draws from NumPy's generator"
    if drawn := walk.drawn():
        return f"draws from {drawn[0].lstrip('.')}, a generator that is not torch's"
    for (name, given), (other, given_then) in zip(one, another, strict=False):
        if name != other:
            return "calls other operators each time"
        if given != given_then:
            is_constant = name.startswith("lift_fresh")
            return f"{'makes a tensor of' if is_constant else f'gives {name}'} other numbers each time"
    return None if len(one) == len(another) else "calls other operators each time"


def _given(run: Callable[[], object], known: Container[int]) -> list[tuple[str, list[Any]]]:
    given = _Given(known)
    with torch.random.fork_rng(devices=[]), given:
        run()
    return given.calls


class _Given(TorchFunctionMode):
    """Notes the name of each call of torch, and the numbers, arrays and unknown tensors that it is given."""

    def __init__(self, known: Container[int]) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []
        self._known = known
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls.append((getattr(func, "__name__", "an operator"), list(self._numbers([args, kwargs or {}]))))
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(each, Tensor):
                self._made[id(each)] = weakref.ref(each)
        return made

    def _comes_from_elsewhere(self, value: Tensor) -> bool:
        made = self._made.get(id(value), lambda: None)()
        return value is not made and id(value) not in self._known and value.is_leaf and value.device.type == "cpu"

    def _numbers(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Mapping):
            value = [*value.values()]
        if isinstance(value, (tuple, list)):
            for each in value:
                yield from self._numbers(each)
        elif isinstance(value, np.ndarray):
            yield value.tobytes()
        elif isinstance(value, (bool, int, float, complex, np.generic)):
            yield repr(value)
        elif type(value) is Tensor and self._comes_from_elsewhere(value) and value.nbytes <= _LARGEST_BYTES:
            with _disable_current_modes(), torch.no_grad():
                yield value.contiguous().view(torch.uint8).numpy().tobytes()
