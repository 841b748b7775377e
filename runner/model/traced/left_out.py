"""Finds what a user's code does of which a trace knows nothing: it holds the forward's operators, drawn once.

A function with another backward than autograd's (a reversed gradient, a straight-through estimator), a hook on a
tensor that a forward makes, backward hooks of modules, and weights that take no part in the backward of one of their
uses would be left out, and other gradients computed without a word. What Python's or NumPy's generator gives would be a
constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.function import BackwardCFunction, Function
from torch.overrides import TorchFunctionMode

from runner.errors import Problem, RequestError
from runner.model.boundary import call_arguments, flatten
from runner.model.kept_state import KeptState
from runner.model.traced.own_functions import other_than_of_autograd

__all__ = ["refuse_left_out"]

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_NEEDS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_OF_MODULES = "BackwardHookFunction"  # by which torch calls a module's full backward hooks
_OF_OPERATORS = "GeneratedBackwardFor_"  # by which torch.library calls custom operators, which a trace keeps
_MODULE_HOOK = "has a module with backward hooks"


def refuse_left_out(model: nn.Module, inputs: Any, target: str) -> None:
    """Run a model once, and refuse it if a trace would leave out a part of what it does.

    Args:
        model: real or fake, in the mode in which it is trained; real ones are left as they are.
        inputs: a batch in the form that the model takes.
        target: names the model in the message.

    Raises:
        RequestError: it would.
    """
    try:
        backward, generator = _left_out(model, inputs)
    except Exception:  # the export says what is wrong with the model
        return
    if backward or generator:
        rule = f"must {'leave the backward to autograd' if backward else 'draw from torch alone'} where it is traced"
        found = (
            f"{backward}, which a trace leaves out" if backward else f"draws from {generator}, which a trace does once"
        )
        why = f"Its forward {found}. A layers() that lists its layers needs no trace"
        raise RequestError([Problem("model.target", target, rule, why, "parallelism.pipeline=1")])


def _left_out(model: nn.Module, inputs: Any) -> tuple[str, str]:
    """What the forward does to the backward, and from which other generator than torch's it draws."""
    args, kwargs = call_arguments(inputs)
    is_fake = detect_fake_mode(list(model.parameters())) is not None
    hooks = _Hooks()
    with nullcontext() if is_fake else _unchanged(model), torch.enable_grad():
        before = _states()
        with hooks:
            outputs = flatten(model(*args, **kwargs))[0]
        drawn = [name for name, state in _states().items() if state != before[name]]
        functions = _functions_of(outputs)
        if hooks.found or functions is None:
            return hooks.found or _MODULE_HOOK, ""
        other = other_than_of_autograd(functions, lambda: model(*args, **kwargs))
    return f"uses {other.__name__}, a torch.autograd.Function" if other else "", drawn[0] if drawn else ""


def _states() -> dict[str, str]:
    return {"Python's random": repr(random.getstate()), "NumPy's generator": repr(np.random.get_state())}


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    kept = KeptState([("model", model)])
    try:
        with kept.first_run():
            yield
    finally:
        kept.put_back()


class _Hooks(TorchFunctionMode):
    """Notes what is told to autograd beside the operators: hooks on tensors, and which weights need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _HOOKS:
            self.found = self.found or "puts a hook on a tensor"
        if func in _NEEDS and isinstance(args[0], nn.Parameter):
            self.found = self.found or "sets requires_grad of a weight"
        return func(*args, **(kwargs or {}))


def _functions_of(outputs: list[Tensor]) -> list[type[Function]] | None:
    """The functions with a backward of their own in the graph of outputs; None if a module's backward hook is one."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = set()
    found: dict[type[Function], None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith(_OF_OPERATORS):
            function: type[Function] = node._forward_cls  # type: ignore[attr-defined]
            if function.__name__ == _OF_MODULES:
                return None
            found[function] = None
        waiting += [parent for parent, _ in node.next_functions]
    return list(found)
