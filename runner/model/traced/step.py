"""A LightningModule's ``training_step`` as a traced model and its loss.

The operators that follow from a batch's input alone are the model, which a pipeline cuts. Those that need the target,
too, are the loss of the last stage, and what the step logs is computed beside it. What the step reads of the run or
changes of the module is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from runner.errors import Problem, RequestError
from runner.model.boundary import call_arguments, num_samples
from runner.model.figures import Figure, WithFigures
from runner.model.lightning_module import OwnStep, lightnings_base
from runner.model.logged_names import COMPUTED
from runner.model.metrics import KeptLogs, LoggedMetric
from runner.model.modes import evaluating
from runner.model.own_methods import brings
from runner.model.traced.cuts import effects, is_random
from runner.model.traced.figures import LoggedValues, common_nodes, metrics_of, nodes_for_figures, own_nodes, taken_by
from runner.model.traced.operators import Program, trace, trace_mode
from runner.model.traced.segments import Entry, part_of
from runner.model.traced.structure import structure_of_graph

__all__ = ["StepLoss", "traced_step"]

_TRAINING, _VALIDATION = "training_step", "validation_step"
_FIX = "parallelism.pipeline=1"
_RULE = "must have a training_step that can be traced in a pipeline, or layers() and loss(output, target)"


class TargetPart:
    """A part of a traced step that runs on the last stage, on the model's output and the target.

    Args:
        module: holds the buffers that it reads, such as weights of classes.
        step: the whole step.
        nodes: the operators of the part.
        crossing: the values of the model that it takes: by position in the model's output.
        num_outputs: the number of values in the model's output.
        targets: the target, flat.
        outputs: what the part returns, flat.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Program,
        nodes: Sequence[Node],
        crossing: Mapping[int, Node],
        num_outputs: int,
        targets: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        given = [each for each in targets if isinstance(each, Node)]
        taken = [*crossing.values(), *given]
        step = replace(step, outputs=tuple(outputs))
        self.part = part_of(step, nodes, takes=taken, gives=None, takes_state=False, gives_state=False)
        self._taken, self._count = tuple(crossing), num_outputs
        self._buffers = [(module.get_submodule(path), leaf) for path, leaf in map(_split, self.part.weights)]
        conditions = replace(step.conditions, ranges={}, signature=inspect.signature(lambda target: None))
        spec = pytree.tree_flatten(((0,), {}))[1]
        self._entry = Entry(replace(step, inputs=tuple(targets), input_spec=spec, conditions=conditions, parts={}))

    def __call__(self, output: Any, target: Any) -> tuple[Any, ...]:
        whole = list(output) if self._count != 1 else [output]
        carried = [whole[place] for place in self._taken]
        bound = self._entry.bind((target,))
        device = next((each.device for each in (*carried, *bound) if isinstance(each, Tensor)), None)
        buffers = [getattr(owner, leaf).to(device) for owner, leaf in self._buffers]
        constants = [constant.to(device) for constant in self.part.constants]
        return tuple(self.part.run(*buffers, *constants, *carried, *bound))


class StepLoss:
    """The loss of a traced ``training_step``; a loss function of output and target.

    Args:
        part: gives the loss, or its sum and weight, and after it what the figures are made of.
        num_made: whether it is the loss, 1, or sum and weight, 2.
        logs: what both steps log.
    """

    def __init__(self, part: TargetPart, num_made: int, logs: KeptLogs) -> None:
        self.part, self.logs, self._count = part, logs, num_made

    def __call__(self, output: Any, target: Any) -> Any:
        made = self.part(output, target)
        loss = made[0] if self._count == 1 else made[: self._count]
        return WithFigures(loss, made[self._count :]) if self.logs.figures else loss


def traced_step(module: Any, batch: tuple[Any, Any], target: str) -> tuple[dict[bool, Program], StepLoss]:
    """The step of a module that lists no layers: its model in training (True) and in evaluation (False), and its loss.

    Args:
        module: a LightningModule; it is as it was afterwards.
        batch: ``(input, target)`` of some samples.
        target: names the module in messages.

    Raises:
        RequestError: the step cannot be traced, or not be divided into a model and a loss.
    """
    with _as_forward(module, target, _TRAINING) as by_mode:
        steps = trace(module, batch, target)
    kinds = {mode: by_mode.get(mode, by_mode[True]) for mode in steps}
    made = {mode: _divided(module, step, batch[0], target, kinds[mode]) for mode, step in steps.items()}
    trained, evaluated = made[True], made[False]
    if trained.structure() != evaluated.structure():
        why = f"{_named(module, _TRAINING)} computes its loss otherwise in evaluation mode"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])
    model = {True: trained.model, False: trained.model if steps[False] is steps[True] else evaluated.model}
    validation, others = _of_validation(module, batch, target, evaluated)
    part, figures, names = trained.with_figures()
    left_out = {_TRAINING: names} | ({} if others is None else {_VALIDATION: others})
    return model, StepLoss(part, len(trained.made), KeptLogs(figures, tuple(validation), left_out))


@dataclass(frozen=True)
class _Divided:
    """One mode of a step as its model and the operators of its loss."""

    module: nn.Module
    step: Program
    model: Program
    nodes: tuple[Node, ...]
    needing: frozenset[Node]
    targets: tuple[Any, ...]
    made: tuple[Any, ...]
    logged: LoggedStep

    def part(self, nodes: Sequence[Node], outputs: Sequence[Any]) -> TargetPart:
        crossing = dict(enumerate(self.model.outputs))
        return TargetPart(self.module, self.step, nodes, crossing, len(crossing), self.targets, outputs)

    def structure(self) -> Hashable:
        return structure_of_graph(self.part(self.nodes, self.made).part.run)

    def with_figures(self) -> tuple[TargetPart, tuple[Figure, ...], list[str]]:
        """The loss with what the step logs and needs nothing else of the model, and the names of what does."""
        there = {*self.model.outputs, *self.needing}
        logged = self.step.outputs[len(self.made) :]
        found = [
            own_nodes(figure, values, self.step, there.__contains__, _held_weights(self.module))
            for figure, values in taken_by(self.logged.figures, logged)
        ]
        kept = [each for each in found if each is not None]
        more = {node for each in kept for node in each.nodes}
        nodes = [node for node in self.step.nodes if node in more or node in {*self.nodes}]
        names = {each.figure.name for each in kept}
        left_out = [*self.logged.left_out, *(each.name for each in self.logged.figures if each.name not in names)]
        part = self.part(nodes, [*self.made, *(value for each in kept for value in each.outputs)])
        return part, tuple(each.figure for each in kept), left_out


def _of_validation(
    module: Any, batch: tuple[Any, Any], target: str, evaluated: _Divided
) -> tuple[list[LoggedMetric], list[str] | None]:
    """What ``validation_step`` logs of the model's output and the target, and the names of what else it logs."""
    if not brings(module, _VALIDATION):
        return [], []
    try:
        with _as_forward(module, target, _VALIDATION) as by_mode, evaluating([module]):
            step = trace_mode(module, batch)
    except Exception:  # a user's code may do anything that a trace cannot stand for; what it logs is left out
        return [], None
    count = len(evaluated.step.inputs) - len(evaluated.targets)
    same = common_nodes(evaluated.model, step, count)
    places = {node: place for place, node in enumerate(evaluated.model.outputs)}
    there = {node: places[of] for node, of in same.items() if of in places}
    targets, logged = step.inputs[count:], by_mode[False]
    there |= {each: -1 for each in targets if isinstance(each, Node)}
    metrics, left_out = [], list(logged.left_out)
    for figure, values in taken_by(logged.figures, step.outputs):
        own = own_nodes(figure, values, step, there.__contains__, _held_weights(module))
        if figure.name in COMPUTED:
            continue
        if own is None:
            left_out.append(figure.name)
            continue
        crossing = {there[node]: node for node in own.given if there[node] >= 0}
        part = TargetPart(module, step, own.nodes, crossing, len(places), targets, own.outputs)
        metrics.append(LoggedMetric(figure.name.removeprefix("val_"), target, part, figure))
    return metrics, left_out


def _held_weights(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _divided(module: nn.Module, step: Program, given: Any, target: str, logged: LoggedStep) -> _Divided:
    """One mode of a step as its model and its loss."""
    args, kwargs = call_arguments(given)
    flat, spec = pytree.tree_flatten((args, kwargs))
    inputs, targets = step.inputs[: len(flat)], step.inputs[len(flat) :]
    made, values = step.outputs[: logged.num_made], step.outputs[logged.num_made :]
    only = nodes_for_figures(step, made, values)
    rest = [node for node in step.nodes if node not in only]
    needing = {each for each in targets if isinstance(each, Node)}
    for node in rest:
        if any(used in needing for used in node.all_input_nodes):
            needing.add(node)
    nodes = [node for node in rest if node in needing]
    used = {each for node in nodes for each in node.all_input_nodes} | {each for each in made if isinstance(each, Node)}
    whole = (
        *(each for each in inputs if isinstance(each, Node)),
        *(each for each in rest if each not in needing),
    )
    crossing = [each for each in whole if each in used and each.op != "get_attr"]
    _refuse_undivided(module, step, nodes, target)
    model = replace(
        step,
        nodes=tuple(node for node in rest if node not in needing),
        inputs=inputs,
        outputs=tuple(crossing),
        conditions=replace(step.conditions, signature=_signature(given)),
        input_spec=spec,
        output_spec=pytree.tree_flatten(0 if len(crossing) == 1 else (0,) * len(crossing))[1],
    )
    return _Divided(module, step, model, tuple(nodes), frozenset(needing), targets, made, logged)


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
            why = f"{_named(module, _TRAINING)} computes with the weight {weight} and the target together"
        elif is_random(node, step.owner):
            why = f"{_named(module, _TRAINING)} draws random numbers ({node.target}) where it has the target"
        elif effects(node, step)[1]:
            why = f"{_named(module, _TRAINING)} changes a tensor in place ({node.target}) by the target"
        else:
            continue
        why += ". What needs the target is the loss, and the model is what follows from the input alone"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])


def _split(name: str) -> tuple[str, str]:
    path, _, leaf = name.rpartition(".")
    return path, leaf


def _named(module: Any, method: str) -> str:
    return f"{type(module).__name__}.{method}"


@dataclass(frozen=True)
class LoggedStep:
    """What a traced step returned and logged: the number of values that are its loss, and what it logs."""

    num_made: int
    figures: tuple[Figure, ...]
    left_out: tuple[str, ...]


@contextmanager
def _as_forward(module: Any, target: str, method: str) -> Iterator[dict[bool, LoggedStep]]:
    """Within the block, calling the module calls its step, which finds the module's own forward in its place.

    Its output is what the step makes, as a flat tuple, and after it what it logs.

    Yields:
        what the last call has logged, in training (True) and in evaluation (False).

    Raises:
        RequestError: the step reads something of the run, or changes what the module holds.
    """
    own, logged = vars(module), LoggedValues(module)
    step = OwnStep(module) if method == _TRAINING else _Validation(module)
    step.around = logged.taking
    run = _NotKnown(f"{_named(module, method)} reads {{}} of the run", target)
    found: dict[bool, LoggedStep] = {}

    def forward(input: Any, target: Any) -> Any:  # noqa: A002  # the names are those of the batch's parts
        here, before = own.pop("forward"), _held(module)
        step.batch_idx = number
        try:
            made = step((input, target))
        finally:
            own["forward"] = here
        changed.extend(name for name, state in _held(module).items() if before.get(name) != state)
        flat = made if isinstance(made, tuple) else (made,)
        found[module.training] = LoggedStep(len(flat), tuple(logged.figures), tuple(logged.left_out))
        return (*flat, *logged.values)

    number: Any = _NotKnown(f"{_named(module, method)} reads batch_idx", target)
    changed: list[str] = []
    trainer, metrics = own.get("_trainer"), [(each, {**vars(each)}) for each in metrics_of(module)]
    own.update(forward=forward, _trainer=run)
    for metric, _ in metrics:
        called = partial(logged.called, metric)
        vars(metric).update(forward=called, update=called)
    try:
        yield found
    finally:
        del own["forward"]
        own["_trainer"] = trainer
        for metric, held in metrics:
            vars(metric).clear()
            vars(metric).update(held)
    if changed:
        why = f"{_named(module, method)} changes {changed[0]}, which a trace leaves out"
        raise RequestError([Problem("model.target", target, _RULE, why, _FIX)])


class _Validation:
    """``validation_step`` as a layer, of which only what it logs is wanted."""

    def __init__(self, module: Any) -> None:
        self.around: Callable[[int], AbstractContextManager[None]] = lambda samples: nullcontext()
        self.batch_idx: Any = 0
        self._step = module.validation_step

    def __call__(self, batch: tuple[Any, Any]) -> tuple[()]:
        arguments = (batch, self.batch_idx)[: len(inspect.signature(self._step).parameters)]
        with self.around(num_samples(batch[0])):
            self._step(*arguments)
        return ()


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


def _held(module: nn.Module) -> dict[str, Any]:
    """What the user's attributes are: plain values, other objects by identity, containers by their length, too."""
    known = {"forward", "log", *vars(nn.Module()), *vars(lightnings_base(module)())}
    found: dict[str, Any] = {}
    metrics = {id(each) for each in metrics_of(module)}  # theirs are never equal to anything
    for path, part in module.named_modules():
        for name, value in vars(part).items() if id(part) not in metrics else ():
            if name in known:
                continue
            is_plain = isinstance(value, int | float | str)
            size = len(value) if isinstance(value, list | dict | set) else None
            found[f"{path}.{name}".lstrip(".")] = None if is_plain else id(value), value if is_plain else None, size
    return found
