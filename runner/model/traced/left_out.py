"""Finds what a user's code does of which a trace knows nothing: it holds the forward's operators, drawn once.

A function with another backward than autograd's (a reversed gradient, a straight-through estimator), a hook on a
tensor that a forward makes, backward hooks of modules, and weights that take no part in the backward of one of their
uses would be left out, and other gradients computed without a word. What comes from elsewhere than torch, such as the
numbers of other generators, would be a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.function import BackwardCFunction, Function
from torch.overrides import TorchFunctionMode

from runner.errors import Problem, RequestError
from runner.model.boundary import call_arguments, flatten
from runner.model.kept_state import KeptState
from runner.model.traced.each_time import other_each_time
from runner.model.traced.own_functions import other_than_of_autograd

__all__ = ["left_out", "refuse_left_out"]

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_NEEDS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_OF_MODULES = "BackwardHookFunction"  # by which torch calls a module's full backward hooks
_OF_COMPILED = "CompiledFunction"  # by which torch calls what torch.compile has made
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
    if any(_is_compiled(module) for module in model.modules()):
        raise RequestError([_compiled_problem(target)])
    try:
        found = left_out(model, inputs)
    except Exception:  # the export says what is wrong with the model
        return
    if found is not None:
        rule, what = found
        if _OF_COMPILED in what:
            raise RequestError([_compiled_problem(target)])
        why = f"Its forward {what}. A layers() that lists its layers needs no trace"
        problem = Problem("model.target", target, f"must {rule} where it is traced", why, "parallelism.pipeline=1")
        raise RequestError([problem])


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped a module, or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _compiled_problem(target: str) -> Problem:
    rule = "must not be compiled by torch.compile where it is traced"
    why = "A trace cannot look into it. With compile=true the runner compiles the parts into which it cuts the model"
    return Problem("model.target", target, rule, why, "compile=true and a function that returns the model as it is")


def left_out(model: nn.Module, inputs: Any) -> tuple[str, str] | None:
    """What a forward must do, and what it does to its backward, or takes from elsewhere than from torch; None if
    nothing. It runs a few times, and leaves real models as they are."""
    args, kwargs = call_arguments(inputs)
    is_fake = detect_fake_mode(list(model.parameters())) is not None
    hooks = _Hooks()

    def run() -> Any:
        return model(*args, **kwargs)

    with nullcontext() if is_fake else _unchanged(model), torch.enable_grad():
        with hooks:
            outputs = flatten(run())[0]
        functions = _functions_of(outputs)
        if hooks.found or functions is None:
            backward = hooks.found or _MODULE_HOOK
        else:
            other = other_than_of_autograd(functions, run)
            backward = f"uses {other.__name__}, a torch.autograd.Function" if other else ""
        drawn = None if backward else other_each_time(model, run)
    if backward:
        return "leave the backward to autograd", f"{backward}, which a trace leaves out"
    return None if drawn is None else ("compute alike each time", f"{drawn}, and a trace holds those of one run")


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
