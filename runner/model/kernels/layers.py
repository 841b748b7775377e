"""Lets modules run the operators of their own trace, in which some are put together or left to the loss.

A module is traced when it first runs, in the mode and on the form of what it is given then. It stays the same object
with the same weights; only its class is a subclass of the one that it had. Where its trace does not cover a call, its
own forward runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.utils import _pytree as pytree

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.kernels.apart import in_own_thread
from runner.model.kernels.hooks import seeing_silent_hooks, without_own_hooks
from runner.model.kernels.order import in_order, order_in_memory
from runner.model.traced.left_out import left_out
from runner.model.traced.module_structure import structure_of
from runner.model.traced.operators import Program, trace_mode
from runner.model.traced.segments import Entry, Part, Segment, part_of

__all__ = ["Changer", "RunsItsTrace", "run_traces"]

Changer = Callable[[Program, bool], Program | None]
"""Makes another program of a trace, in training or not; None: there is nothing to change."""


@dataclass(frozen=True)
class _Trace:
    part: Part
    entry: Entry
    output_spec: Any


class _Tracer:
    """Traces modules, those that are alike once.

    Args:
        change: makes another program of each trace.
        left: is told why a module runs its own forward.
    """

    def __init__(self, change: Changer, left: Callable[[str], None]) -> None:
        self._change, self._left = change, left
        self._lock = threading.RLock()
        self._structures: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self._known: dict[Hashable, _Trace | None] = {}
        self.busy = threading.local()

    def __deepcopy__(self, memo: object) -> _Tracer:
        return self

    def run(self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's trace gives, or what its own forward gives."""
        if (args and kwargs) or getattr(_TRACING, "is_on", False) or torch.compiler.is_exporting():
            return own(*args, **kwargs)
        value: Any = kwargs or args
        found = self._trace_of(module, value)
        if found is None:
            return own(*args, **kwargs)
        try:
            bound = found.entry.bind(value)
        except ValueError as error:
            self._left(f"a {type(module).__name__} runs as it is written: {error}")
            return own(*args, **kwargs)
        weights = [_attribute(module, name) for name in found.part.weights]
        made = found.part.run(*weights, *_here(found.part.constants, weights, bound), *bound)
        return pytree.tree_unflatten(list(made), found.output_spec)

    def _trace_of(self, module: nn.Module, value: Any) -> _Trace | None:
        with self._lock:
            if module not in self._structures:
                self._structures[module] = structure_of(module)
            key = self._structures[module], module.training, _form(value)
            if key not in self._known:
                self._known[key] = self._traced(module, value)
            return self._known[key]

    def _traced(self, module: nn.Module, value: Any) -> _Trace | None:
        mode = detect_fake_mode(flatten(list(value.values() if isinstance(value, dict) else value))[0])

        def traced() -> Program:
            with mode or nullcontext(), _tracing(), _seeing_functions() as functions:
                with seeing_silent_hooks(module) as silent:
                    if (found := left_out(module, enter_graph(map_tensors(_leaf, value)))) is not None:
                        raise TypeError(f"its forward {found[1]}")
                if silent:
                    raise TypeError(f"a {silent[0]} inside it has a hook that returns nothing, which would not run")
                with without_own_hooks(module):
                    program = trace_mode(module, map_tensors(_two_samples, value))
                if functions:
                    raise TypeError(f"{functions[0]} is an autograd.Function, whose backward a trace leaves out")
                return program

        try:
            program = self._change(in_own_thread(traced), module.training)
        except Exception as error:  # a user's code may do anything that a trace cannot
            self._left(f"a {type(module).__name__} runs as it is written: {str(error).strip().splitlines()[0][:200]}")
            return None
        if program is None:
            return None
        inputs = [node for node in program.inputs if isinstance(node, Node)]
        part = part_of(program, program.nodes, takes=inputs, gives=None, takes_state=False, gives_state=False)
        return _Trace(part, Entry(program), program.output_spec)


class RunsItsTrace:
    """What such modules have in common."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tracer: _Tracer = vars(self)["runner_tracer"]
        return tracer.run(self, super().forward, args, kwargs)  # type: ignore[arg-type, misc]


def run_traces(change: Changer, left: Callable[[str], None]) -> Callable[[nn.Module], nn.Module]:
    """A function that lets a module run its trace, and returns it.

    Args:
        change: makes another program of each trace.
        left: is told why a module runs its own forward.
    """
    tracer = _Tracer(change, left)

    def install(module: nn.Module) -> nn.Module:
        if not isinstance(module, RunsItsTrace | Segment):  # a segment's trace is a part of the model's
            own: Any = type(module)
            module.__class__ = _subclass(own)
            vars(module)["runner_tracer"] = tracer
        return module

    return install


@cache
def _subclass(own: Any) -> Any:
    return type(own.__name__, (RunsItsTrace, own), {"__module__": own.__module__, "__doc__": own.__doc__})


_TRACING = threading.local()


@contextmanager
def _tracing() -> Iterator[None]:
    """The block, in which modules run their own forwards."""
    _TRACING.is_on = True
    try:
        yield
    finally:
        _TRACING.is_on = False


@contextmanager
def _seeing_functions() -> Iterator[list[str]]:
    """The names of the autograd functions that are applied in the block, but for those of torch's own operators."""
    names: list[str] = []
    kind: Any = torch.autograd.Function
    own, thread = kind.__dict__["apply"], threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not cls.__module__.startswith("torch."):
            names.append(cls.__name__)
        return own.__func__(cls, *args, **kwargs)

    kind.apply = classmethod(apply)
    try:
        yield names
    finally:
        kind.apply = own


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor that a layer may change, with a gradient, as inner layers get them."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _two_samples(tensor: Tensor) -> Tensor:
    """At least two samples, because an export takes a size of 1 for a constant."""
    if not tensor.dim() or len(tensor) != 1:
        return tensor.detach()
    return in_order(torch.cat([tensor, tensor]), _order(tensor)).detach()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The order in memory of a tensor, which is that of its axes wherever it may be."""
    return tuple(range(tensor.dim())) if tensor.is_contiguous() else order_in_memory(tensor.stride())


def _layout(tensor: Tensor) -> Hashable:
    """What a trace takes for granted of a tensor in memory: an export drops a ``contiguous`` that copies nothing."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    order = _order(tensor)
    return order if tensor.permute(order).is_contiguous() else (order, tensor.stride())


def _form(value: Any) -> Hashable:
    tensors, nesting = flatten(list(value.values()) if isinstance(value, dict) else list(value))
    names = tuple(value) if isinstance(value, dict) else ()
    sizes = tuple((each.dim(), each.dtype, each.device, _layout(each)) for each in tensors)
    return names, repr(nesting), sizes


def _attribute(module: nn.Module, name: str) -> Tensor:
    *path, leaf = name.split(".")
    for step in path:
        module = getattr(module, step)
    return getattr(module, leaf)  # type: ignore[no-any-return]


def _here(constants: tuple[Tensor, ...], weights: list[Tensor], given: tuple[Any, ...]) -> list[Tensor]:
    tensors = [*weights, *(each for each in given if isinstance(each, Tensor))]
    return [each.to(tensors[0].device) if tensors else each for each in constants]
