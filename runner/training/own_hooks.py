"""Refuses hooks of a user's LightningModule that compute with weights of other ranks, whose memory is released here.

Such a hook would fail with torch's words about sizes, as a teacher that follows the trained weights does, or take the
weights of one rank for all, as a logged norm does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from runner.errors import Problem, RequestError
from runner.model.own_methods import brings

__all__ = ["guard_hooks"]

_VALUES = (Tensor.data.__get__,)  # type: ignore[attr-defined]  # what gives another tensor over the same memory
_GETTER = "__get__"


def guard_hooks(module: Any, target: str, released: WeakIdKeyDictionary) -> None:
    """Let every hook that a module's class defines refuse to compute with released weights.

    Args:
        module: a LightningModule.
        target: names it in the message.
        released: the weights without memory, each with its name; it may be filled later.
    """
    for name in dir(type(module)):
        if name.startswith("on_") and brings(module, name) and callable(own := getattr(module, name)):
            vars(module)[name] = _guarded(f"{type(module).__name__}.{name}", own, target, released)


def _guarded(hook: str, own: Callable[..., Any], target: str, released: WeakIdKeyDictionary) -> Callable[..., Any]:
    @wraps(own)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _Refusing(hook, target, released):
            return own(*args, **kwargs)

    return guarded


class _Refusing(TorchFunctionMode):
    """Refuses operators on released weights; what a weight is besides its values may be asked."""

    def __init__(self, hook: str, target: str, released: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._hook, self._target, self._released = hook, target, released

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != _GETTER or func in _VALUES:
            for each in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(each, Tensor) and each in self._released:
                    raise RequestError([self._problem(str(self._released[each]))])
        return func(*args, **(kwargs or {}))

    def _problem(self, weight: str) -> Problem:
        rule = "must have no hook that computes with weights of other ranks' layers"
        why = f"{self._hook} reads {weight}, whose values are on another rank alone"
        return Problem("model.target", self._target, rule, why, "parallelism.pipeline=1")
