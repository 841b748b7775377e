"""What the steps of a LightningModule log, kept where they are traced.

A trace holds operators, and what a step logs is made by operators, too. Those that nothing else needs run on the last
stage, beside the loss, as far as they use only what the loss has as well. What else a step logs is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from runner.model.figures import Figure, SummedMetric
from runner.model.lightning_module import lightnings_base
from runner.model.traced.cuts import effects, is_random
from runner.model.traced.operators import Program
from runner.model.traced.structure import Itself, described

__all__ = ["LoggedValues", "Own", "common_nodes", "metrics_of", "nodes_for_figures", "own_nodes", "taken_by"]

_SHOWN = ("prog_bar", "logger", "on_step", "on_epoch")
_MEAN = ("mean", torch.mean)


@dataclass(frozen=True)
class Own:
    """The operators that make one logged value on the last stage.

    Args:
        figure: what is logged.
        nodes: the operators, in their order.
        outputs: what they make.
        given: the values of the model that they take.
    """

    figure: Figure
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    given: tuple[Node, ...]


class LoggedValues:
    """Takes the place of a module's ``log`` while a step is traced.

    Args:
        module: a LightningModule.

    Attributes:
        figures: what the last call of the step has logged and can be kept, in order.
        left_out: the names of what else it has logged.
        values: what the figures are made of, flat.
    """

    def __init__(self, module: Any) -> None:
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.values: list[Tensor] = []
        self._calls: list[_Call] = []
        self._metrics = {id(each): SummedMetric.of(each) for each in metrics_of(module)}
        self._module, self._signature = module, inspect.signature(lightnings_base(module).log)

    @contextmanager
    def taking(self, _: int = 0) -> Iterator[None]:
        """Within the block, which is one call of the step, keep what it logs."""
        self.figures, self.left_out, self.values, self._calls = [], [], [], []
        self._module.__dict__["log"] = self._log
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def called(self, metric: Any, *args: Any, **kwargs: Any) -> Tensor:
        """In place of a metric object's call; the value, NaN, shows where it is used for anything else than a log."""
        self._calls.append(_Call(metric, args, kwargs, torch.tensor(float("nan"))))
        return self._calls[-1].value

    def _log(self, *args: Any, **kwargs: Any) -> None:
        given = self._signature.bind(self._module, *args, **kwargs).arguments
        name, value = str(given["name"]), given["value"]
        shown = {key: bool(given[key]) for key in _SHOWN if given.get(key) is not None}
        calls = [call for call in self._calls if value is call.value or value is call.metric]
        is_mean = given.get("reduce_fx", "mean") in _MEAN
        kept: tuple[Figure, list[Tensor]] | None = None
        if len(calls) == 1:
            kept = self._of_metric(name, shown, calls[0])
        elif not calls and isinstance(value, Tensor) and value.numel() == 1 and is_mean:
            kept = Figure(name, shown), [value.detach().reshape(())]
        if kept is None:
            self.left_out.append(name)
        else:
            self.figures.append(kept[0])
            self.values += kept[1]

    def _of_metric(self, name: str, shown: dict[str, Any], call: _Call) -> tuple[Figure, list[Tensor]] | None:
        metric = self._metrics.get(id(call.metric))
        flat = [*call.args, *call.kwargs.values()]
        if metric is None or not all(isinstance(each, Tensor) for each in flat):
            return None
        return Figure(name, shown, metric, tuple(call.kwargs), len(flat)), [each.detach() for each in flat]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a metric object, and the value that stands for what it would have returned."""

    metric: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor


def metrics_of(module: nn.Module) -> list[nn.Module]:
    """The objects of torchmetrics that a module holds, which change themselves at each call."""
    return [
        each for each in module.modules() if any(b.__module__.startswith("torchmetrics.") for b in type(each).__mro__)
    ]


def taken_by(figures: Sequence[Figure], values: Sequence[Any]) -> Iterator[tuple[Figure, Sequence[Any]]]:
    """Each figure with what it is made of, of the values of all."""
    start = 0
    for figure in figures:
        yield figure, values[start : start + figure.takes]
        start += figure.takes


def nodes_for_figures(program: Program, made: Sequence[Any], logged: Sequence[Any]) -> set[Node]:
    """The operators of a step that only logged values need.

    Args:
        program: the step.
        made, logged: what it returns, and what it logs.
    """
    users: dict[Node, list[Node]] = {}
    for node in program.nodes:
        for used in node.all_input_nodes:
            users.setdefault(used, []).append(node)
    only: set[Node] = set()
    for node in reversed(program.nodes):
        is_used = node in users or node in logged
        if node in made or not is_used or is_random(node, program.owner) or effects(node, program)[1]:
            continue
        if node.op != "get_attr" and all(user in only for user in users.get(node, ())):
            only.add(node)
    return only


def own_nodes(
    figure: Figure, outputs: Sequence[Any], program: Program, is_there: Callable[[Node], bool], held: Container[str]
) -> Own | None:
    """The operators that make a logged value of what the loss has, or None if it needs more.

    Args:
        figure: what is logged.
        outputs: what it is made of, in the trace.
        program: the step.
        is_there: whether the last stage has a value: of the model, or with the target.
        held: the weights by name, of which the loss has none.
    """
    found: set[Node] = set()
    given: set[Node] = set()
    to_see = list(outputs)
    while to_see:
        node = to_see.pop()
        if not isinstance(node, Node):
            return None
        if node in found or node in given:
            continue
        if is_there(node):
            given.add(node)
        elif node.op == "placeholder":
            if program.weights.get(node, "") in held or (node not in program.weights and node not in program.constants):
                return None
        elif node.op != "get_attr":
            if is_random(node, program.owner) or effects(node, program)[1]:
                return None
            found.add(node)
            to_see += node.all_input_nodes
    return Own(figure, tuple(node for node in program.nodes if node in found), tuple(outputs), tuple(given))


def common_nodes(program: Program, other: Program, inputs: int) -> dict[Node, Node]:
    """Values of ``other`` that are those of ``program``: the same operators of the same inputs, weights and constants.

    Args:
        program, other: two traces of one module.
        inputs: how many of the first inputs are the same.

    Returns:
        value of ``other`` to that of ``program``.
    """
    numbers: dict[Hashable, int] = {}
    theirs = {number: node for node, number in _numbered(program, inputs, numbers).items()}
    own = _numbered(other, inputs, numbers)
    return {node: theirs[number] for node, number in own.items() if number in theirs}


def _numbered(program: Program, inputs: int, numbers: dict[Hashable, int]) -> dict[Node, int]:
    """A number for each value, by how it is made; values that are changed in place after they are made have none."""
    known: dict[Node, int] = {}
    changed: set[Node] = set()

    def of_node(value: Any) -> Hashable | None:
        return (Node, known.get(value, Itself(value))) if isinstance(value, Node) else None

    def number(node: Node, key: Hashable) -> None:
        known[node] = numbers.setdefault(key, len(numbers))

    for place, node in enumerate(program.inputs[:inputs]):
        if isinstance(node, Node):
            number(node, ("input", place))
    for node, name in program.weights.items():
        number(node, ("weight", name))
    for node, constant in program.constants.items():
        number(node, ("constant", Itself(constant)))
    for node in program.nodes:
        is_its_own = node.op == "get_attr" or is_random(node, program.owner)
        made = node.target, described(node.args, of_node), described(node.kwargs, of_node)
        number(node, Itself(node) if is_its_own else made)
        for written in effects(node, program)[1]:
            number(written, ("written", known[written], known[node]))
            changed.add(written)
    return {node: number for node, number in known.items() if node not in changed}
