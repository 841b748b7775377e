"""A LightningModule's ``training_step`` as a traced model and its loss.

The operators that follow from a batch's input alone are the model, which a pipeline cuts. Those that need the target,
too, are the loss of the last stage. What the step does besides returning its loss has no place in a trace: what it logs
is left out, and what it reads of the run or changes of the module is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from runner.errors import Problem, RequestError
from runner.model.boundary import call_arguments
from runner.model.lightning_module import OwnStep, lightnings_base
from runner.model.traced.cuts import effects, is_random
from runner.model.traced.operators import Program, trace
from runner.model.traced.segments import Entry, part_of
from runner.model.traced.structure import structure_of_graph

__all__ = ["StepLoss", "traced_step"]

_FIX = "parallelism.pipeline=1"
_RULE = "must have a training_step that can be traced in a pipeline, or layers() and loss(output, target)"


class StepLoss:
    """The part of a traced ``training_step`` that needs the target; a loss function of output and target.

    Args:
        module: holds the buffers that it reads, such as weights of classes.
        step: the whole step in training mode.
        nodes: the operators that need the target.
        crossing: the values of the other operators that these use: the model's output.
        targets: the target, flat.
    """

    def __init__(
        self, module: nn.Module, step: Program, nodes: Sequence[Node], crossing: Sequence[Node], targets: Sequence[Any]
    ) -> None:
        given = [each for each in targets if isinstance(each, Node)]
        self.part = part_of(step, nodes, takes=[*crossing, *given], gives=None, takes_state=False, gives_state=False)
        self._spec, self._count = step.output_spec, len(crossing)
        self._buffers = [(module.get_submodule(path), leaf) for path, leaf in map(_split, self.part.weights)]
        conditions = replace(step.conditions, ranges={}, signature=inspect.signature(lambda target: None))
        spec = pytree.tree_flatten(((0,), {}))[1]
        self._entry = Entry(replace(step, inputs=tuple(targets), input_spec=spec, conditions=conditions, parts={}))

    def __call__(self, output: Any, target: Any) -> Any:
        carried = list(output) if self._count != 1 else [output]
        bound = self._entry.bind((target,))
        device = next((each.device for each in (*carried, *bound) if isinstance(each, Tensor)), None)
        buffers = [getattr(owner, leaf).to(device) for owner, leaf in self._buffers]
        constants = [constant.to(device) for constant in self.part.constants]
        return pytree.tree_unflatten(list(self.part.run(*buffers, *constants, *carried, *bound)), self._spec)


def traced_step(module: Any, batch: tuple[Any, Any], target: str) -> tuple[dict[bool, Program], StepLoss]:
    """The step of a module that lists no layers: its model in training (True) and in evaluation (False), and its loss.

    Args:
        module: a LightningModule; it is as it was afterwards.
        batch: ``(input, target)`` of some samples.
        target: names the module in messages.

    Raises:
        RequestError: the step cannot be traced, or not be divided into a model and a loss.
    """
    with _as_forward(module, target):
        steps = trace(module, batch, target)
    made = {mode: _divided(module, step, batch[0], target) for mode, step in steps.items()}
    (model, loss), (evaluating, other) = made[True], made[False]
    if structure_of_graph(loss.part.run) != structure_of_graph(other.part.run):
        why = f"{_name(module)} computes its loss otherwise in evaluation mode"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])
    return {True: model, False: model if steps[False] is steps[True] else evaluating}, loss


def _divided(module: nn.Module, step: Program, given: Any, target: str) -> tuple[Program, StepLoss]:
    """One mode of a step as its model and its loss."""
    args, kwargs = call_arguments(given)
    flat, spec = pytree.tree_flatten((args, kwargs))
    inputs, targets = step.inputs[: len(flat)], step.inputs[len(flat) :]
    needing = {each for each in targets if isinstance(each, Node)}
    for node in step.nodes:
        if any(used in needing for used in node.all_input_nodes):
            needing.add(node)
    nodes = [node for node in step.nodes if node in needing]
    used = {each for node in nodes for each in node.all_input_nodes} | {
        each for each in step.outputs if isinstance(each, Node)
    }
    whole = (
        *(each for each in inputs if isinstance(each, Node)),
        *(each for each in step.nodes if each not in needing),
    )
    crossing = [each for each in whole if each in used and each.op != "get_attr"]
    _refuse_undivided(module, step, nodes, target)
    model = replace(
        step,
        nodes=tuple(node for node in step.nodes if node not in needing),
        inputs=inputs,
        outputs=tuple(crossing),
        conditions=replace(step.conditions, signature=_signature(given)),
        input_spec=spec,
        output_spec=pytree.tree_flatten(0 if len(crossing) == 1 else (0,) * len(crossing))[1],
    )
    return model, StepLoss(module, step, nodes, crossing, targets)


def _signature(given: Any) -> inspect.Signature:
    """That of a function which binds a batch's input as a whole, as the step has it, to the name ``input``."""
    kinds = inspect.Parameter
    several = kinds.VAR_POSITIONAL if isinstance(given, tuple | list) else kinds.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter("input", kinds.VAR_KEYWORD if isinstance(given, dict) else several)])


def _refuse_undivided(module: nn.Module, step: Program, nodes: Sequence[Node], target: str) -> None:
    """Refuse a step whose part that needs the target is no loss: it would be computed on the last stage alone."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for node in nodes:
        weights = (step.weights.get(each, "") for each in node.all_input_nodes)
        weight = next((name for name in weights if name in held), None)
        if weight is not None:
            why = f"{_name(module)} computes with the weight {weight} and the target together"
        elif is_random(node, step.owner):
            why = f"{_name(module)} draws random numbers ({node.target}) where it has the target"
        elif effects(node, step)[1]:
            why = f"{_name(module)} changes a tensor in place ({node.target}) by the target"
        else:
            continue
        why += ". What needs the target is the loss, and the model is what follows from the input alone"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])


def _split(name: str) -> tuple[str, str]:
    path, _, leaf = name.rpartition(".")
    return path, leaf


def _name(module: Any) -> str:
    return f"{type(module).__name__}.training_step"


@contextmanager
def _as_forward(module: Any, target: str) -> Iterator[None]:
    """Within the block, calling the module calls its step, which finds the module's own forward in its place.

    Raises:
        RequestError: the step reads something of the run, or changes what the module holds.
    """
    step, own = OwnStep(module), vars(module)
    run = _NotKnown(f"{_name(module)} reads {{}} of the run", target)

    def forward(input: Any, target: Any) -> Any:  # noqa: A002  # the names are those of the batch's parts
        here, before = own.pop("forward"), _held(module)
        step.batch_idx = number
        try:
            made = step((input, target))
        finally:
            own["forward"] = here
        changed.extend(name for name, state in _held(module).items() if before.get(name) != state)
        return made

    number: Any = _NotKnown(f"{_name(module)} reads batch_idx", target)
    changed: list[str] = []
    trainer, metrics = own.get("_trainer"), [(each, {**vars(each)}) for each in _metrics(module)]
    own.update(forward=forward, _trainer=run)
    for metric, _ in metrics:
        vars(metric).update(forward=_not_measured, update=_not_measured)
    try:
        yield
    finally:
        del own["forward"]
        own["_trainer"] = trainer
        for metric, held in metrics:
            vars(metric).clear()
            vars(metric).update(held)
    if changed:
        why = f"{_name(module)} changes {changed[0]}, which a trace leaves out"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])


class _NotKnown:
    """Stands for something of a run that a step is given before there is one; using it is refused by name."""

    def __init__(self, why: str, target: str) -> None:
        self.__dict__.update(_why=why, _target=target)

    def _refuse(self, *of: Any) -> Any:
        asked = of[0] if of and isinstance(of[0], str) else "it"
        why = f"{self._why.format(asked)}, of which a trace would keep one value"
        raise RequestError([Problem("model.target", self._target, _RULE, why, _FIX)])

    def __add__(self, _: int) -> _NotKnown:
        return self  # of the next call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    __hash__ = object.__hash__
    __setattr__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __mod__ = __mul__ = _refuse
    __sub__ = __floordiv__ = __truediv__ = __int__ = __index__ = __float__ = __str__ = __format__ = _refuse


def _metrics(module: nn.Module) -> list[nn.Module]:
    """The objects of torchmetrics that a module holds, which change themselves at each call."""
    return [
        each for each in module.modules() if any(b.__module__.startswith("torchmetrics.") for b in type(each).__mro__)
    ]


def _not_measured(*_: Any, **__: Any) -> Tensor:
    """In place of a metric's value, which a step logs; NaN shows where it is used for anything else."""
    return torch.tensor(float("nan"))


def _held(module: nn.Module) -> dict[str, Any]:
    """What the user's attributes are: plain values, other objects by identity, containers by their length, too."""
    known = {"forward", "log", *vars(nn.Module()), *vars(lightnings_base(module)())}
    found: dict[str, Any] = {}
    metrics = {id(each) for each in _metrics(module)}  # theirs are never equal to anything
    for path, part in module.named_modules():
        for name, value in vars(part).items() if id(part) not in metrics else ():
            if name in known:
                continue
            is_plain = isinstance(value, int | float | str)
            size = len(value) if isinstance(value, list | dict | set) else None
            found[f"{path}.{name}".lstrip(".")] = None if is_plain else id(value), value if is_plain else None, size
    return found
