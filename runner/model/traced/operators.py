"""Any module as two lists of operators, made by torch.export: one for training and one for evaluation.

The exported operators are those that the module itself would call, before autograd sees them, so that running them
gives the same numbers. An export fixes ``module.training``, so there are two of them, or one that stands for both if
the model is known to compute the same in both modes. The batch axis is dynamic; other axes are dynamic where the model
allows it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from runner.errors import Problem, RequestError
from runner.model.boundary import call_arguments, flatten, shapes
from runner.model.buffers import BufferSnapshot
from runner.model.by_value import by_value
from runner.model.fake import begin_autograd
from runner.model.modes import evaluating, in_training
from runner.model.out_of_range import out_of_range
from runner.model.targets import explained
from runner.model.traced.conditions import Conditions, conditions_of
from runner.model.traced.decided import asks_for_a_bool, deciding_comparisons
from runner.model.traced.left_out import refuse_left_out
from runner.model.traced.lengths import fixes_a_size, following_lengths
from runner.model.traced.modes import computes_alike
from runner.model.traced.writes import written_early

__all__ = ["Program", "trace", "trace_mode"]

_Help = tuple[Callable[[Exception], bool], Callable[[], AbstractContextManager[None]]]

_HELPS: tuple[_Help, ...] = ((asks_for_a_bool, deciding_comparisons), (fixes_a_size, following_lengths))
"""Which error of torch.export a model's code may have raised, and what lets a second export pass it."""
_DROPPED = ("_assert_tensor_metadata",)  # they would fix dtype and device to those of the trace


@dataclass(frozen=True)
class Program:
    """One mode of a traced model.

    Args:
        owner: holds the objects to which the nodes of its graph refer.
        nodes: operators in the order in which the model runs them.
        weights: placeholder of each parameter and buffer to its name in the model.
        constants: placeholder of each constant tensor in the model's code to that tensor.
        inputs: the model's input, flat: a placeholder for a tensor, the traced value for anything else.
        outputs: the model's output, flat: nodes and plain values.
        conditions: what the sizes of the input must be, as the model's code has taken the traced way.
        input_spec, output_spec: the nesting of the flat lists; that of the input is for (args, kwargs).
        parts: the inputs of which a rank has a part, each with the divided dimension and the number of parts.
        uncut: positions at which it must not be cut, because a value crosses that ranks do not have in common.
    """

    owner: GraphModule
    nodes: tuple[Node, ...]
    weights: Mapping[Node, str]
    constants: Mapping[Node, Tensor]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    conditions: Conditions
    input_spec: Any
    output_spec: Any
    uncut: frozenset[int] = frozenset()
    parts: Mapping[Node, tuple[int, int]] = field(default_factory=dict)


def trace(model: nn.Module, inputs: Any, target: str) -> dict[bool, Program]:
    """``model`` in training mode (True) and in evaluation mode (False).

    Args:
        model: real or fake, in the mode in which it is trained; its modes and the random state are restored.
        inputs: a batch of at least two samples, in the form that the model takes.
        target: names the model in messages.

    Raises:
        RequestError: it does not take the batch, torch.export cannot trace it, or its forward makes buffers or puts
            others in their place, which a trace leaves out; the message contains the reason.
    """
    random_state = torch.get_rng_state()
    programs: dict[bool, Program] = {}
    try:
        with _keeping_its_buffers(model, target):
            refuse_left_out(in_training(model), inputs, target)
            alike = computes_alike(model, inputs)
            programs[True] = _export(model, inputs)
            with evaluating([model]):
                programs[False] = programs[True] if alike else _export(model, inputs)
    except RequestError:
        raise
    except Exception as error:
        _refuse_wrong_input(model, inputs, target)
        rule = "cannot be traced, and a pipeline cuts a module without layers where it is traced"
        why = f"{_scripts_in(model) or _reason(error)}. A layers() that lists its layers needs no trace"
        raise RequestError([Problem("model.target", target, rule, why, "parallelism.pipeline=1")]) from error
    finally:
        torch.set_rng_state(random_state)
    return programs


def trace_mode(model: nn.Module, inputs: Any) -> Program:
    """``model`` in the mode in which it is.

    Args:
        model: real or fake.
        inputs: a batch of at least two samples, in the form that the model takes.

    Raises:
        Exception: it cannot be traced, or its forward makes buffers or puts others in their place.
    """
    with _keeping_its_buffers(model, type(model).__name__):
        return _export(model, inputs)


@contextmanager
def _keeping_its_buffers(model: nn.Module, target: str) -> Iterator[None]:
    """Refuse a model whose forward registers or assigns buffers: torch.export drops them or leaves fake ones behind."""
    names = {module: name for name, module in model.named_modules()}
    made: list[str] = []

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if module in names and buffer is not module._buffers.get(name):  # spectral norm assigns what it wrote into
            made.append(f"{names[module]}.{name}".lstrip("."))

    before = BufferSnapshot(names, copied=False)
    handle = register_module_buffer_registration_hook(note)
    try:
        yield
    except RequestError:  # a buffer that grows makes a forward compute in another way each time, too
        if not made:
            raise
    finally:
        handle.remove()
        if made:
            before.put_back()
    if made:
        rule = "must not make buffers, or put others in their place, where it is traced"
        why = f"Its forward does so with {made[0]}, and a trace leaves that out. A layers() needs no trace"
        raise RequestError([Problem("model.target", target, rule, why, "parallelism.pipeline=1")])


def _refuse_wrong_input(model: nn.Module, inputs: Any, target: str) -> None:
    """Run a model that cannot be traced as it is, and refuse it if that fails, because it would fail anywhere.

    Raises:
        RequestError: the model does not take the batch, or returns what cannot be handed on.
        Exception: it fails on fake tensors, of which the model may ask what only real ones have.
    """
    args, kwargs = call_arguments(inputs)
    try:
        with torch.no_grad():
            output = model(*args, **kwargs)
    except Exception as error:
        if detect_fake_mode() is not None:
            raise
        why = f"Given {shapes(inputs)}, {out_of_range(error, model) or f'it raised {explained(error)}'}"
        raise RequestError([Problem("model.target", target, "must take what the data gives", why)]) from error
    try:
        flatten(output)
    except TypeError as error:
        rule = "must return tensors, or tuples, lists and dicts of them"
        raise RequestError([Problem("model.target", target, rule, str(error))]) from error


def _export(model: nn.Module, inputs: Any) -> Program:
    args, kwargs = call_arguments(inputs)
    begin_autograd()
    with _quiet(), _naming_keywords(model, args, kwargs), _knowing_dataclasses(model):
        exported = _exported(model, args, kwargs, _axes(model, args, kwargs), _HELPS)
    graph = exported.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    weights: dict[Node, str] = {}
    constants: dict[Node, Tensor] = {}
    given: list[Any] = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            constant = isinstance(spec.arg, ConstantArgument)
            given.append(spec.arg.value if constant else placeholders[spec.arg.name])
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            weights[placeholders[spec.arg.name]] = str(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[placeholders[spec.arg.name]] = exported.constants[str(spec.target)]
        else:
            raise TypeError(f"its code holds a {spec.kind.name.lower().replace('_', ' ')}, {spec.target}")
    outputs = next(iter(node for node in graph.nodes if node.op == "output")).args[0]
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    assert all(kind is OutputKind.USER_OUTPUT for kind in kinds), "exports before decomposition mutate in place"
    computing = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    return Program(
        owner=exported.graph_module,
        nodes=tuple(
            node for node in written_early(computing, weights) if not any(name in str(node.target) for name in _DROPPED)
        ),
        weights=weights,
        constants=constants,
        inputs=tuple(given),
        outputs=tuple(outputs),
        conditions=conditions_of(exported, model),
        input_spec=exported.call_spec.in_spec,
        output_spec=exported.call_spec.out_spec,
    )


def _exported(model: nn.Module, args: Any, kwargs: Any, axes: dict[str, Any], helps: tuple[_Help, ...]) -> Any:
    """What torch.export makes of a model, with such helps as its refusals ask for."""
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=axes, strict=False)
    except Exception as error:  # torch's own kinds are not public
        help_ = next((each for each in helps if each[0](error)), None)
        if help_ is None:
            raise
    with help_[1]():
        return _exported(model, args, kwargs, axes, tuple(each for each in helps if each is not help_))


@contextmanager
def _naming_keywords(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Give a forward that takes ``**kwargs`` a signature with their names: torch.export counts them twice otherwise."""
    signature = inspect.signature(model.forward)
    parameters = list(signature.parameters.values())
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), None)
    names = signature.bind(*args, **kwargs).arguments.get(rest, ()) if rest is not None else ()
    if not names:
        yield
        return
    named = [*parameters[:-1], *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names)]
    function: Any = getattr(model.forward, "__func__", None)
    if function is not None:  # the signature of a method is that of its function without the first parameter
        named.insert(0, next(iter(inspect.signature(function).parameters.values())))
    function = function or model.forward
    with patch.object(function, "__signature__", signature.replace(parameters=named), create=True):
        yield


@contextmanager
def _knowing_dataclasses(model: nn.Module) -> Iterator[None]:
    """Tell torch of the dataclasses that a model returns, which torch.export refuses while it does not know them."""

    def tell(module: nn.Module, given: Any, value: Any) -> None:
        if is_dataclass(value) and not isinstance(value, type) and type(value) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        parts, _ = pytree.tree_flatten(value, lambda part: part is not value)
        for part in parts if parts != [value] else ():
            tell(module, given, part)

    handle = model.register_forward_hook(tell)
    try:
        yield
    finally:
        handle.remove()


def _axes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The dynamic axes of every tensor: the first is the batch, others are dynamic if the model does not fix them."""
    dim = torch.export.Dim

    def axes(value: Any) -> dict[int, Any] | None:
        if not isinstance(value, Tensor):
            return None
        return {axis: dim.AUTO if axis else dim.DYNAMIC for axis in range(value.dim())}

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {name: pytree.tree_map(axes, value) for name, value in bound.items()}


def _scripts_in(model: nn.Module) -> str:
    """What to say of a model with a part of TorchScript, which torch.export cannot look into; empty without one."""
    scripts = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    name = next(scripts, None)
    return "" if name is None else f"{name or 'It'} is a ScriptModule, into which torch.export cannot look"


def _reason(error: Exception) -> str:
    """The line of users' code that decides by a value, or the first line of torch's message that is not empty."""
    known = by_value(error)
    if known is not None:
        return known
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if fixes_a_size(error):
        return "Something takes the batch's size as a plain number, as a loop over samples does, and a trace fixes it"
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.') if lines else 'no message'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log messages and warnings of torch.export about its internals.

    At an error it prints the graph so far, at each of the attempts.
    """
    from torch.export import _trace as export_trace  # a second of imports, which only a traced model needs

    names = ("torch.export", "torch.fx.experimental", "torch._dynamo", "torch._export")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            vars(export_trace)["print"] = lambda *values, **options: None
            yield
    finally:
        vars(export_trace).pop("print", None)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
